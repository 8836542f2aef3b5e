// What the environment says about the emulated devices, and the names that all parts share.
#pragma once
#include <c10/core/Device.h>
#include <cstdint>
#include <mutex>

namespace emulated {

constexpr auto kCuda = c10::DeviceType::CUDA;
constexpr int kMaxDevices = 16;
constexpr int kPoison = 0xFF;  // NaN in every floating dtype, -1 in signed integers

int emulated_devices();      // EMULATED_CUDA_DEVICES: what the machine has
int device_count();          // those that this process sees: cuda:0, cuda:1, ...
void show_devices(int count);
int64_t device_memory();     // EMULATED_CUDA_BYTES: bytes of one device
bool is_rocm();              // EMULATED_CUDA_GPU names an AMD GPU
bool is_loud();              // EMULATED_CUDA_LOUD: findings go to stderr at once
const char* report_folder(); // EMULATED_CUDA_REPORT, or nullptr

int current_device();
void set_current_device(int device);
c10::Device with_index(c10::Device device);  // "cuda" becomes the current device

// One lock guards the state of memory, streams and findings. No Python code runs under it: a
// thread that waits for the GIL while it holds the lock would stop all others.
using Lock = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex& state_mutex();

}  // namespace emulated
