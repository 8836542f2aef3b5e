// The address space of device memory: one file in memory, mapped twice.
//
// Tensors hold addresses of the first mapping, which nobody may read or write: a host read of
// device memory ends the process, with its Python line. Kernels run on the second mapping of the
// same bytes, so no page is opened or closed for a kernel. EMULATED_CUDA_PROTECT=0 opens the first.
#pragma once
#include <cstddef>

namespace emulated {

char* kernel_view(const void* device_address);  // other addresses come back as they are
bool is_device_address(const void* address);
char* reserve_segment(size_t bytes);            // an address of the first mapping
void release_segment(char* segment, size_t bytes);
void poison(char* device_address, size_t bytes);
void watch_host_reads();                        // (re)installs the handler of SIGSEGV
bool is_forked_child();                         // device memory is not here: CUDA's rule, too

}  // namespace emulated
