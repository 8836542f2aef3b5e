#include "hooks.h"

#include "arena.h"
#include "attention.h"
#include "generators.h"
#include "memory.h"
#include "pinned.h"
#include "settings.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace emulated {

using c10::DeviceIndex;

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasCUDART() const override { return true; }
  bool hasROCM() const override { return is_rocm(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex current_device() const override { return getCurrentDevice(); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(emulated::current_device());
  }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device);
  }
  at::Device getDeviceFromPtr(void* address) const override {
    TORCH_CHECK(is_device_address(address),
                "The specified pointer resides on host memory and is not registered with any "
                "CUDA device.");
    return {kCuda, static_cast<DeviceIndex>(device_of_address(static_cast<char*>(address)))};
  }
  void deviceSynchronize(DeviceIndex device) const override {
    device_guard()->synchronizeDevice(device);
  }
};

// DistributedDataParallel times its passes with the timer of the device.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimeRef(start), to = getTimeRef(end);
    if (from < 0 || to < 0) return std::nullopt;
    return to - from;
  }
};

void install() {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(
      reinterpret_cast<at::native::fused_sdp_choice_fn>(&choose_attention));
  constexpr uint8_t priority = 10;
  c10::SetAllocator(kCuda, device_allocator(), priority);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kCuda)].store(device_guard());
  at::setHostAllocator(kCuda, pinned_allocator(), priority);
  watch_host_reads();
}

}  // namespace emulated

namespace at {
using CUDAHooks = emulated::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace c10d {
using EmulatedTimer = emulated::Timer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, EmulatedTimer);
}  // namespace c10d
