// A GPU that has failed: each later call on it raises what CUDA says, as of a real one.

#pragma once

#include <string>

#include <c10/core/Device.h>

namespace emulated_cuda {

// Let every later call on this GPU, in this process, fail with these words of CUDA's.
// error: "unspecified launch failure"; code: the number of cudaError_t
void fail_device(c10::DeviceIndex device, const std::string& error, int code);

// c10::AcceleratorError if this GPU has failed. The first thing that a kernel, a copy, an
// allocation and a wait of the host on a device call.
void check_device(c10::DeviceIndex device);

}  // namespace emulated_cuda
