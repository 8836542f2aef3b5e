// The clock that torch's profiler reads around each operation on an emulated GPU.
//
// Kineto learns of kernels from CUPTI, NVIDIA's library, which is not there. torch's profiler then
// takes two CUDA events around each operation, and gives the operation the time between them
// (ProfilerState::KINETO_GPU_FALLBACK), as it does on a GPU without CUPTI. Without these methods
// every one of the events fails, with a stack trace of C++ that takes a tenth of a second.

#include <chrono>
#include <functional>
#include <memory>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/profiler/stubs/base.h>

namespace {

using torch::profiler::impl::ProfilerStubs;
using torch::profiler::impl::ProfilerVoidEventStub;

int64_t nanoseconds() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// An event holds the time at which it was recorded: kernels run as they are called, so that the
// stream has passed it.
struct Clock final : ProfilerStubs {
  c10::impl::VirtualGuardImpl guard() const {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA);
  }

  bool enabled() const override { return true; }

  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event, int64_t* cpu_ns)
      const override {
    int64_t now = nanoseconds();
    if (device) *device = guard().getDevice().index();
    if (cpu_ns) *cpu_ns = now;
    *event = std::make_shared<int64_t>(now);
  }

  float elapsed(const ProfilerVoidEventStub* begin, const ProfilerVoidEventStub* end)
      const override {
    int64_t began = *static_cast<const int64_t*>(begin->get());
    int64_t ended = *static_cast<const int64_t*>(end->get());
    return static_cast<float>(ended - began) / 1000.0f;  // microseconds
  }

  void onEachDevice(std::function<void(int)> visit) const override {
    for (int index = 0; index < guard().deviceCount(); ++index) visit(index);
  }

  void synchronize() const override {}  // nothing is under way
  void mark(const char*) const override {}  // of NVTX, which nobody reads here
  void rangePush(const char*) const override {}
  void rangePop() const override {}
};

[[maybe_unused]] const bool registered = [] {
  static Clock clock;
  torch::profiler::impl::registerCUDAMethods(&clock);
  return true;
}();

}  // namespace
