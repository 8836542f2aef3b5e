// Pinned host memory. What a copy on its way still reads or writes can be closed to the host, so
// that an access which comes too early is seen with its Python line (copies.h).
#pragma once
#include <ATen/core/CachingHostAllocator.h>

#include <cstddef>

namespace emulated {

at::HostAllocator* pinned_allocator();
bool is_pinned(const void* address);

enum class HostMay { read_and_write, only_read, do_nothing };
// Closes by whole pages. A page stays open that holds another part of the same tensor's memory.
void let_host(HostMay may, const char* pinned, size_t bytes);

}  // namespace emulated
