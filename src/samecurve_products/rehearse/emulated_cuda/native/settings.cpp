#include "settings.h"

#include <c10/util/Exception.h>
#include <atomic>
#include <cstdlib>
#include <string>

namespace emulated {

static int64_t number(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoll(text, nullptr, 10) : otherwise;
}

int emulated_devices() {
  static const int count = [] {
    const auto asked = number("EMULATED_CUDA_DEVICES", 2);
    TORCH_CHECK(asked >= 1 && asked <= kMaxDevices, "EMULATED_CUDA_DEVICES=", asked,
                ": the emulator has 1 to ", kMaxDevices, " devices");
    return static_cast<int>(asked);
  }();
  return count;
}

static std::atomic<int> shown{-1};  // -1: nobody has chosen among them

int device_count() { return shown < 0 ? emulated_devices() : shown.load(); }

void show_devices(int count) {
  TORCH_CHECK(count <= emulated_devices(), count, " devices of ", emulated_devices());
  shown = count;
}

int64_t device_memory() {
  static const int64_t bytes = number("EMULATED_CUDA_BYTES", int64_t(80) << 30);
  return bytes;
}

bool is_rocm() {
  static const bool rocm = [] {
    const char* gpu = std::getenv("EMULATED_CUDA_GPU");
    return gpu && std::string(gpu).rfind("MI", 0) == 0;
  }();
  return rocm;
}

bool is_loud() {
  static const bool loud = std::getenv("EMULATED_CUDA_LOUD") != nullptr;
  return loud;
}

const char* report_folder() {
  static const char* folder = std::getenv("EMULATED_CUDA_REPORT");
  return folder && *folder ? folder : nullptr;
}

static thread_local int this_threads_device = 0;

int current_device() { return this_threads_device; }

void set_current_device(int device) {
  if (device < 0) return;
  TORCH_CHECK(device < device_count(),
              "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have "
              "enough GPUs? (", device_count(), " emulated, index ", device, ")");
  this_threads_device = device;
}

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : c10::Device(device.type(), current_device());
}

std::recursive_mutex& state_mutex() {
  static auto* mutex = new std::recursive_mutex();  // outlives every static destructor
  return *mutex;
}

}  // namespace emulated
