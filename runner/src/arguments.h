// The command line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace g4 {

struct Arguments {
  std::string folder;
  std::optional<std::string> prompt;  // without one, standard input is the prompt
  bool raw = false;                   // no chat turn around the prompt
  bool tokenize = false;              // only print the prompt's ids
  bool cuda_graph = false;
  bool help = false;
  int64_t max_new_tokens = 512;
  int64_t prefill_chunk = 0;  // 0: the program's own
  float temperature = 0;      // 0: greedy
  int64_t top_k = 0;          // 0: every token
  float top_p = 1;            // 1: every token
  std::optional<uint64_t> seed;
  std::string ids_file;     // the new ids, one a line
  std::string logits_file;  // raw fp32, one row of the vocabulary for each new id
};

extern const char* const kHelp;

// Options may be spelled with dashes or underscores. Throws UsageError.
Arguments parse_arguments(int argc, char** argv);

}  // namespace g4
