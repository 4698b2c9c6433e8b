// An exported program: its two methods over one key-value cache, and what it says of itself.
#pragma once

#include <cstdint>
#include <executorch/extension/module/module.h>
#include <memory>
#include <string>
#include <vector>

#include "sampler.h"

namespace g4 {

// How a program that samples by itself shall do it.
struct Sampling {
  float temperature;
  int64_t top_k;
  float top_p;
};

class Program {
 public:
  // Loads both methods of the export in `folder`. Throws Error for a folder that is none, a damaged
  // program, one for a backend that this runner lacks, and cuda_graph without CUDA.
  Program(const std::string& folder, bool cuda_graph);

  // Runs ids at positions start, start + 1, ...; what the last one gives becomes `next()`. A single
  // id goes through decode. Throws Error when the runtime fails.
  void run(const std::vector<int64_t>& ids, int64_t start, const Sampling& sampling,
           Sampler& sampler);

  // The id that the last run chose.
  int64_t next() const { return next_; }
  // The last run's logits; empty if the program samples by itself.
  const std::vector<float>& logits() const { return logits_; }

  int64_t max_seq_len = 0;
  int64_t prefill_chunk = 0;
  int64_t vocab_size = 0;
  int64_t bos_id = 0;
  bool samples = false;
  std::vector<int64_t> eos_ids;

 private:
  std::vector<int64_t> constants(const std::string& name);
  int64_t constant(const std::string& name);

  std::unique_ptr<executorch::extension::Module> module_;
  std::string path_;
  int64_t next_ = 0;
  std::vector<float> logits_;
};

}  // namespace g4
