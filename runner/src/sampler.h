// From logits to the next token: temperature, then top-k, then top-p on what is left.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

namespace g4 {

class Sampler {
 public:
  // temperature 0 is greedy, top_k 0 and top_p 1 keep every token; without a seed, a fresh one.
  Sampler(float temperature, int64_t top_k, float top_p, std::optional<uint64_t> seed);

  // Throws Error when a logit is NaN or infinite.
  int64_t choose(const std::vector<float>& logits);

  // A random number in [0, 1), for programs that sample by themselves.
  float uniform();

 private:
  float temperature_;
  int64_t top_k_;
  float top_p_;
  std::mt19937_64 random_;
};

}  // namespace g4
