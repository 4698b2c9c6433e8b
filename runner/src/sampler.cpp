#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "error.h"

namespace g4 {

Sampler::Sampler(float temperature, int64_t top_k, float top_p, std::optional<uint64_t> seed)
    : temperature_(temperature),
      top_k_(top_k),
      top_p_(top_p),
      random_(seed ? *seed : std::random_device{}()) {}

float Sampler::uniform() {
  // 24 bits: every value is a float, and none rounds up to 1.
  return static_cast<float>(random_() >> 40) * 0x1p-24F;
}

int64_t Sampler::choose(const std::vector<float>& logits) {
  for (const float logit : logits) {
    if (!std::isfinite(logit)) {
      throw Error("the program's logits are not finite: its weights are damaged.");
    }
  }
  if (temperature_ == 0) {
    return std::max_element(logits.begin(), logits.end()) - logits.begin();
  }
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return logits[a] > logits[b];
  });
  size_t kept = order.size();
  if (top_k_ > 0 && static_cast<size_t>(top_k_) < kept) {
    kept = top_k_;
    // Ties with the last of the k stay: which of them came first says nothing.
    while (kept < order.size() && logits[order[kept]] == logits[order[kept - 1]]) {
      ++kept;
    }
  }
  std::vector<double> weight(kept);
  const double highest = logits[order[0]];
  for (size_t i = 0; i < kept; ++i) {
    weight[i] = std::exp((logits[order[i]] - highest) / temperature_);
  }
  double total = std::accumulate(weight.begin(), weight.end(), 0.0);
  if (top_p_ < 1) {
    double reached = 0;
    size_t count = 0;
    while (count < kept && reached < top_p_ * total) {
      reached += weight[count++];
    }
    kept = std::max<size_t>(count, 1);
    total = std::accumulate(weight.begin(), weight.begin() + static_cast<ptrdiff_t>(kept), 0.0);
  }
  double left = uniform() * total;
  for (size_t i = 0; i + 1 < kept; ++i) {
    left -= weight[i];
    if (left < 0) {
      return order[i];
    }
  }
  return order[kept - 1];
}

}  // namespace g4
