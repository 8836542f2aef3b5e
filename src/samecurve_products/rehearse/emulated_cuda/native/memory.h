// Device memory: CUDA's caching allocator on emulated devices.
#pragma once
#include "order.h"

#include <c10/core/Allocator.h>

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace emulated {

struct Chunk;  // a piece of a segment, in use or free

// What a tensor's storage owns. The history is what the race check reads.
struct Block {
  uint64_t id = 0;
  Chunk* chunk = nullptr;  // none for a block of 0 bytes
  char* address = nullptr;
  size_t requested = 0;
  int device = 0;
  StreamKey stream = -1;
  History history;
  std::set<StreamKey> recorded;  // record_stream()
};

enum class Fill { poison, nothing };  // nothing: the caller overwrites every byte
c10::DataPtr allocate(size_t bytes, int device, Fill fill);
Block* block_of(const c10::DataPtr& data);  // nullptr where the data is not on an emulated device
Block* live_block(uint64_t id);             // nullptr once it is freed; lock held
void record_use(Block& block, StreamKey stream);
int device_of_address(const char* address);

c10::Allocator* device_allocator();

void empty_cache();
void set_memory_fraction(int device, double fraction);

struct Stat {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(int64_t amount);
};
using PoolStats = std::array<Stat, 3>;  // all, large_pool, small_pool
struct MemoryStats {
  std::map<std::string, PoolStats> by_name;  // allocated_bytes, reserved_bytes, ...
  std::map<std::string, int64_t> numbers;    // num_alloc_retries, num_ooms, ...
};
MemoryStats memory_stats(int device);
void reset_peak(int device);
void reset_accumulated(int device);
int64_t memory_limit(int device);
int64_t memory_reserved(int device);

}  // namespace emulated
