// Which accesses to device memory no event orders: the race check.
#pragma once
#include "streams.h"
#include "findings.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace emulated {

struct Block;

// One kernel on one stream.
struct Launch {
  StreamKey stream = -1;
  uint64_t time = 0;
  const std::string* name = nullptr;
  Place place;
  std::vector<uint64_t> outputs;  // ids of the blocks that the kernel wrote
};
using LaunchPointer = std::shared_ptr<Launch>;

// The last write of a block, and since then the last read on each stream.
struct History {
  LaunchPointer maker;  // the first write
  LaunchPointer writer;
  std::vector<LaunchPointer> readers;
  bool is_spoilt = false;  // the next read finds poison: an unordered write may have come late
};

const std::string* kept_name(const std::string& name);  // one copy for ever, for Launch::name
LaunchPointer launch(int device, const std::string* name);
LaunchPointer launch_on(StreamKey stream, const std::string* name);

// Notes one access of the launch and reports what no event orders.
// True: the kernel read what was not there yet, and must be given poison in the block's place.
bool touch(const LaunchPointer& launch, Block& block, bool writes);

// A freed block that other streams may still use; the allocator asks before it hands out memory.
void note_freed(Block& block, bool is_large, const Place& place);
void check_reuse(Block& fresh, bool is_large);

}  // namespace emulated
