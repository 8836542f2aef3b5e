// Faults of a GPU: a failed one, on which each later call raises what CUDA says, and one of which
// another program has taken memory.

#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

namespace emulated {

// Let every later call on this GPU, in this process, fail with these words of CUDA's.
// error: "unspecified launch failure"; code: the number of cudaError_t
void fail_device(c10::DeviceIndex device, const std::string& error, int code);

// c10::AcceleratorError if this GPU has failed. The first thing that a kernel, a copy, an
// allocation and a wait of the host on a device call.
void check_device(c10::DeviceIndex device);

// Let another program take this much of a GPU's memory.
void take_memory(c10::DeviceIndex device, int64_t bytes);

// Bytes that other programs have taken; they are missing in the limit of the allocator.
int64_t taken_memory(c10::DeviceIndex device);

}  // namespace emulated
