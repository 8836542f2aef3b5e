// Streams, events, and what each stream and the host know of each other's work: vector clocks.
//
// A stream's clock counts its kernels. Waiting for an event merges the clocks that the event saw.
// Two accesses are ordered if the later one's stream, or the host before it, has waited.
#pragma once
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <vector>

namespace emulated {

// CUDA has one default stream and a pool of 32 on each device; the pool is handed out in turn.
constexpr int kStreamsPerDevice = 33;

using StreamKey = int;  // device * kStreamsPerDevice + the stream's number; -1: none
using Clock = std::vector<uint64_t>;

StreamKey current_stream(int device);
StreamKey key_of(const c10::Stream& stream);
int device_of(StreamKey stream);
std::string name_of(StreamKey stream);

// All of these are called with the state's lock held.
uint64_t tick(StreamKey stream);  // a kernel starts: the stream's new time
uint64_t time_of(StreamKey stream);
bool is_ordered(StreamKey after, StreamKey before, uint64_t time);
bool host_has_waited(StreamKey stream, uint64_t time);
void wait_for_stream(StreamKey waits, StreamKey awaited);
void host_waits_for(StreamKey stream);

// The host has waited (lock not held): late copies arrive, the wait is counted with its Python
// line, and torch.cuda.set_sync_debug_mode may object.
void note_host_sync(const char* what, bool debug_mode_objects);
void set_sync_debug_mode(int mode);
int sync_debug_mode();

c10::impl::DeviceGuardImplInterface* device_guard();

}  // namespace emulated
