#include "faults.h"

#include <array>
#include <atomic>
#include <mutex>

#include <c10/util/Exception.h>

namespace emulated {

namespace {

constexpr int most_devices = 64;

struct Failure {
  std::string error;
  int code;
};

std::mutex mutex;
std::array<Failure, most_devices> failures;
std::array<std::atomic<bool>, most_devices> failed;
std::array<std::atomic<int64_t>, most_devices> taken;

}  // namespace

void fail_device(c10::DeviceIndex device, const std::string& error, int code) {
  std::lock_guard<std::mutex> lock(mutex);
  failures.at(device) = {error, code};
  failed.at(device) = true;
}

void check_device(c10::DeviceIndex device) {
  if (device < 0 || !failed.at(device)) return;
  std::lock_guard<std::mutex> lock(mutex);
  const Failure& failure = failures.at(device);
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, failure.code,
      "CUDA error: " + failure.error +
          "\nCUDA kernel errors might be asynchronously reported at some other API call, so the"
          " stacktrace below might be incorrect.\nFor debugging consider passing"
          " CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side"
          " assertions.\n");
}

void take_memory(c10::DeviceIndex device, int64_t bytes) { taken.at(device) += bytes; }

int64_t taken_memory(c10::DeviceIndex device) { return taken.at(device); }

}  // namespace emulated
