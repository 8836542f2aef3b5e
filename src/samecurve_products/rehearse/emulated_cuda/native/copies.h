// Copies between host and devices, and what is late about the asynchronous ones.
#pragma once
#include "order.h"

#include <cstddef>

namespace emulated {

// Copies that the host has waited for by now arrive, and their pinned sources are compared with
// what they held. Called without the lock.
void settle_late_copies();
// A kernel reads the block: the pinned sources of its copies must be unchanged until now.
void check_late_sources(const Launch& reader, const Block& block);
// The host waits for the stream's work so far, and what is late arrives.
void wait_on_host(StreamKey stream);
// The host has touched pinned memory that is closed to it: reports that, and opens the memory.
// False: no copy has closed this address. Called by the handler of SIGSEGV.
bool note_early_access(const char* address);
void forget_late_copies(const char* pinned, size_t bytes);  // the pinned memory is freed

}  // namespace emulated
