#include "arguments.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>
#include <system_error>

#include "error.h"

namespace g4 {

const char* const kHelp =
    R"(g4-runner DIR [PROMPT] [options]

Runs a program exported by `g4 export-cpu` or `g4 export-cuda`. DIR is the export's folder; without
PROMPT the prompt is standard input. Text goes to standard output, figures to standard error.

  --raw                 the prompt as it is, after the BOS token, without a chat turn around it
  --max-new-tokens N    at most this many new tokens [512]
  --temperature T       0 is greedy [0]
  --top-k K             sample among the K likeliest; 0 is all [0]
  --top-p P             sample among the likeliest that make up P [1]
  --seed N              makes sampling repeatable
  --prefill-chunk N     tokens of the prompt a call [the program's limit]
  --tokenize            print the prompt's token ids, without BOS, and stop
  --cuda-graph          record decode as a CUDA graph (CUDA programs)
  --ids FILE            write the new ids, one a line
  --logits FILE         write the logits that gave each new id, raw fp32
)";

namespace {

template <typename Number>
Number parse_number(const std::string& option, const std::string& text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw UsageError(option + " " + text + ": give a number.");
  }
  return value;
}

void check(const Arguments& arguments) {
  if (arguments.folder.empty()) {
    throw UsageError("which program? give the folder of an export (--help shows more).");
  }
  if (arguments.max_new_tokens < 1) {
    throw UsageError("--max-new-tokens: give at least 1.");
  }
  if (arguments.prefill_chunk < 0 || arguments.prefill_chunk == 1) {
    throw UsageError("--prefill-chunk: give at least 2.");
  }
  const float t = arguments.temperature;
  if (!(t == 0 || (t >= 1e-5F && t <= 1e5F))) {
    throw UsageError("--temperature: give 0 (greedy) or 1e-5 to 1e5.");
  }
  if (arguments.top_k < 0) {
    throw UsageError("--top-k: give 0 (every token) or more.");
  }
  if (!(arguments.top_p > 0 && arguments.top_p <= 1)) {
    throw UsageError("--top-p: give more than 0 and at most 1.");
  }
}

}  // namespace

Arguments parse_arguments(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (word.rfind("--", 0) != 0) {
      if (arguments.folder.empty()) {
        arguments.folder = word;
      } else if (!arguments.prompt) {
        arguments.prompt = word;
      } else {
        throw UsageError("a prompt is one argument: quote it.");
      }
      continue;
    }
    std::optional<std::string> attached;
    if (const auto equals = word.find('='); equals != std::string::npos) {
      attached = word.substr(equals + 1);
      word.resize(equals);
    }
    std::replace(word.begin() + 2, word.end(), '_', '-');
    const auto is_switch = [&](std::string_view name) {
      if (word == name && attached) {
        throw UsageError(word + " takes no value.");
      }
      return word == name;
    };
    if (is_switch("--help")) {
      arguments.help = true;
      return arguments;
    }
    if (is_switch("--raw")) {
      arguments.raw = true;
      continue;
    }
    if (is_switch("--tokenize")) {
      arguments.tokenize = true;
      continue;
    }
    if (is_switch("--cuda-graph")) {
      arguments.cuda_graph = true;
      continue;
    }
    const auto value = [&]() -> std::string {
      if (attached) {
        return *attached;
      }
      if (++i == argc) {
        throw UsageError(word + " needs a value.");
      }
      return argv[i];
    };
    if (word == "--max-new-tokens") {
      arguments.max_new_tokens = parse_number<int64_t>(word, value());
    } else if (word == "--prefill-chunk") {
      arguments.prefill_chunk = parse_number<int64_t>(word, value());
    } else if (word == "--temperature") {
      arguments.temperature = parse_number<float>(word, value());
    } else if (word == "--top-k") {
      arguments.top_k = parse_number<int64_t>(word, value());
    } else if (word == "--top-p") {
      arguments.top_p = parse_number<float>(word, value());
    } else if (word == "--seed") {
      arguments.seed = parse_number<uint64_t>(word, value());
    } else if (word == "--ids") {
      arguments.ids_file = value();
    } else if (word == "--logits") {
      arguments.logits_file = value();
    } else {
      throw UsageError("no option " + word + " (--help lists them).");
    }
  }
  check(arguments);
  return arguments;
}

}  // namespace g4
