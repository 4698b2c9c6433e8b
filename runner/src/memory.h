// How much memory the process has held at most.
#pragma once

#include <cstddef>
#include <cstdint>

namespace g4 {

// Follows the memory in use on the GPU, from outside of whatever allocates it.
class GpuMemory {
 public:
  // Finds the CUDA runtime if the process has one; without, every figure is 0.
  GpuMemory();

  // Looks at the device now; call it where the use may be at its highest.
  void sample();

  // Highest use seen beyond that at the start, in MiB.
  int64_t peak_mib() const;

 private:
  using MemGetInfo = int (*)(size_t* free, size_t* total);

  MemGetInfo info_ = nullptr;
  size_t free_at_start_ = 0;
  size_t least_free_ = 0;
};

// Highest resident set of this process, in MiB.
int64_t host_peak_mib();

}  // namespace g4
