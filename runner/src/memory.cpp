#include "memory.h"

#include <dlfcn.h>
#include <sys/resource.h>

#include <algorithm>

namespace g4 {

GpuMemory::GpuMemory() {
#ifdef G4_HAS_CUDA
  for (const char* name : {"libcudart.so", "libcudart.so.13", "libcudart.so.12"}) {
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL)) {
      info_ = reinterpret_cast<MemGetInfo>(dlsym(library, "cudaMemGetInfo"));
      break;
    }
  }
#endif
  size_t total = 0;
  if (info_ && info_(&free_at_start_, &total) != 0) {
    info_ = nullptr;
  }
  least_free_ = free_at_start_;
}

void GpuMemory::sample() {
  size_t free = 0;
  size_t total = 0;
  if (info_ && info_(&free, &total) == 0) {
    least_free_ = std::min(least_free_, free);
  }
}

int64_t GpuMemory::peak_mib() const {
  return static_cast<int64_t>((free_at_start_ - least_free_) >> 20);
}

int64_t host_peak_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss >> 10;  // Linux counts in KiB
}

}  // namespace g4
