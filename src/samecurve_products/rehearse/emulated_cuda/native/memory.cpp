#include "memory.h"

#include "arena.h"
#include "counts.h"
#include "faults.h"
#include "settings.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <unordered_map>

namespace emulated {

// CUDA's caching allocator (c10/cuda/CUDACachingAllocator.cpp): the same sizes, so that the
// figures resemble a GPU's.
constexpr size_t kSmallestBlock = 512;
constexpr size_t kLargestSmall = 1 << 20;     // up to here a block comes from the small pool
constexpr size_t kSmallSegment = 2 << 20;
constexpr size_t kLargeSegment = 20 << 20;    // for blocks below kOwnSegment
constexpr size_t kOwnSegment = 10 << 20;      // from here a block has a segment of its own
constexpr size_t kSegmentRounding = 2 << 20;

static size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

struct Chunk {
  char* address;
  size_t bytes;
  StreamKey stream;
  bool is_large, is_used = false, is_poisoned = false;
  Chunk *before = nullptr, *after = nullptr;  // neighbours in the segment
};

struct SmallestFirst {
  bool operator()(const Chunk* a, const Chunk* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->address < b->address;
  }
};

struct Waiting {  // freed, but a recorded stream may still use it
  Chunk* chunk;
  std::vector<std::pair<StreamKey, uint64_t>> uses;
  int questions = 0;
};
constexpr int kQuestionsUntilReusable = 3;

void Stat::add(int64_t amount) {
  current += amount;
  peak = std::max(peak, current);
  (amount > 0 ? allocated : freed) += amount > 0 ? amount : -amount;
}

class DeviceMemory {
 public:
  explicit DeviceMemory(int device) : device_(device), limit_(device_memory()) {}

  Chunk* take(size_t requested, StreamKey stream) {
    const size_t bytes = std::max(rounded(requested, kSmallestBlock), kSmallestBlock);
    const bool is_large = bytes > kLargestSmall;
    free_what_is_done();
    Chunk* chunk = find_free(bytes, stream, is_large);
    if (!chunk) chunk = new_segment(bytes, requested, stream, is_large);
    split(chunk, bytes);
    chunk->is_used = true;
    count("allocation", is_large, 1);
    count("allocated_bytes", is_large, static_cast<int64_t>(chunk->bytes));
    count("requested_bytes", is_large, static_cast<int64_t>(requested));
    count("active", is_large, 1);
    count("active_bytes", is_large, static_cast<int64_t>(chunk->bytes));
    return chunk;
  }

  void give_back(Chunk* chunk, size_t requested, const std::set<StreamKey>& recorded) {
    poison(chunk->address, chunk->bytes);
    chunk->is_poisoned = true;
    count("allocation", chunk->is_large, -1);
    count("allocated_bytes", chunk->is_large, -static_cast<int64_t>(chunk->bytes));
    count("requested_bytes", chunk->is_large, -static_cast<int64_t>(requested));
    Waiting waiting{chunk, {}};
    for (const auto stream : recorded)
      if (stream != chunk->stream && !host_has_waited(stream, time_of(stream)))
        waiting.uses.emplace_back(stream, time_of(stream));
    if (waiting.uses.empty()) make_free(chunk);
    else waiting_.push_back(std::move(waiting));
  }

  void release_cached() {
    for (const auto& waiting : waiting_) make_free(waiting.chunk);
    waiting_.clear();
    for (auto* pool : {&small_, &large_}) {
      for (auto at = pool->begin(); at != pool->end();) {
        Chunk* chunk = *at;
        if (chunk->before || chunk->after) {
          ++at;
          continue;
        }
        at = pool->erase(at);
        count("segment", chunk->is_large, -1);
        count("reserved_bytes", chunk->is_large, -static_cast<int64_t>(chunk->bytes));
        ++stats_.numbers["num_device_free"];
        release_segment(chunk->address, chunk->bytes);
        segments_.erase(chunk->address);
        delete chunk;
      }
    }
  }

  bool holds(const char* address) const {
    auto above = segments_.upper_bound(const_cast<char*>(address));
    if (above == segments_.begin()) return false;
    --above;
    return address < above->first + above->second;
  }

  MemoryStats& stats() { return stats_; }
  int64_t limit() const { return limit_; }
  int64_t reserved() { return stats_.by_name["reserved_bytes"][0].current; }
  void set_fraction(double fraction) {
    allowed_ = static_cast<int64_t>(fraction * static_cast<double>(limit_));
  }

 private:
  void count(const char* name, bool is_large, int64_t amount) {
    auto& stat = stats_.by_name[name];
    stat[0].add(amount);
    stat[is_large ? 1 : 2].add(amount);
  }

  auto& pool(bool is_large) { return is_large ? large_ : small_; }

  void free_what_is_done() {
    std::vector<Waiting> still;
    for (auto& waiting : waiting_) {
      const bool done = std::all_of(waiting.uses.begin(), waiting.uses.end(), [](const auto& use) {
        return host_has_waited(use.first, use.second);
      });
      if (done || ++waiting.questions >= kQuestionsUntilReusable) make_free(waiting.chunk);
      else still.push_back(std::move(waiting));
    }
    waiting_ = std::move(still);
  }

  Chunk* find_free(size_t bytes, StreamKey stream, bool is_large) {
    Chunk wanted{nullptr, bytes, stream, is_large};
    const auto found = pool(is_large).lower_bound(&wanted);
    if (found == pool(is_large).end() || (*found)->stream != stream) return nullptr;
    Chunk* chunk = *found;
    pool(is_large).erase(found);
    if (chunk->before || chunk->after) {
      count("inactive_split", is_large, -1);
      count("inactive_split_bytes", is_large, -static_cast<int64_t>(chunk->bytes));
    }
    return chunk;
  }

  Chunk* new_segment(size_t bytes, size_t requested, StreamKey stream, bool is_large) {
    const size_t size = !is_large ? kSmallSegment
        : bytes < kOwnSegment ? kLargeSegment : rounded(bytes, kSegmentRounding);
    const auto fits = [&] {
      const int64_t free = limit_ - taken_memory(static_cast<c10::DeviceIndex>(device_));
      const int64_t most = allowed_ < 0 ? free : std::min(free, allowed_);
      return reserved() + static_cast<int64_t>(size) <= most;
    };
    check_device(static_cast<c10::DeviceIndex>(device_));
    if (!fits()) {
      ++stats_.numbers["num_alloc_retries"];
      release_cached();
    }
    if (!fits()) {
      ++stats_.numbers["num_ooms"];
      raise_out_of_memory(requested);
    }
    auto* chunk = new Chunk{reserve_segment(size), size, stream, is_large};
    segments_[chunk->address] = size;
    count("segment", is_large, 1);
    count("reserved_bytes", is_large, static_cast<int64_t>(size));
    ++stats_.numbers["num_device_alloc"];
    return chunk;
  }

  void split(Chunk* chunk, size_t bytes) {
    const size_t rest = chunk->bytes - bytes;
    if (chunk->is_large ? rest <= kLargestSmall : rest < kSmallestBlock) return;
    auto* free = new Chunk(*chunk);
    free->address += bytes;
    free->bytes = rest;
    free->is_used = false;
    free->before = chunk;
    if (free->after) free->after->before = free;
    chunk->after = free;
    chunk->bytes = bytes;
    insert_free(free);
  }

  void insert_free(Chunk* chunk) {
    if (chunk->before || chunk->after) {
      count("inactive_split", chunk->is_large, 1);
      count("inactive_split_bytes", chunk->is_large, static_cast<int64_t>(chunk->bytes));
    }
    pool(chunk->is_large).insert(chunk);
  }

  void remove_free(Chunk* chunk) {
    count("inactive_split", chunk->is_large, -1);
    count("inactive_split_bytes", chunk->is_large, -static_cast<int64_t>(chunk->bytes));
    pool(chunk->is_large).erase(chunk);
  }

  bool is_free(Chunk* chunk) { return chunk && !chunk->is_used; }

  void make_free(Chunk* chunk) {
    count("active", chunk->is_large, -1);
    count("active_bytes", chunk->is_large, -static_cast<int64_t>(chunk->bytes));
    chunk->is_used = false;
    if (is_free(chunk->before)) {
      Chunk* before = chunk->before;
      remove_free(before);
      join(before, chunk);
      chunk = before;
    }
    if (is_free(chunk->after)) {
      Chunk* after = chunk->after;
      remove_free(after);
      join(chunk, after);
    }
    insert_free(chunk);
  }

  void join(Chunk* first, Chunk* second) {
    first->bytes += second->bytes;
    first->is_poisoned = first->is_poisoned && second->is_poisoned;
    first->after = second->after;
    if (second->after) second->after->before = first;
    delete second;
  }

  static std::string size_text(int64_t bytes) {
    char text[40];
    const auto size = static_cast<double>(bytes);
    if (bytes <= 1024) std::snprintf(text, sizeof text, "%lld bytes", static_cast<long long>(bytes));
    else if (bytes <= 1 << 20) std::snprintf(text, sizeof text, "%.2f KiB", size / 1024);
    else if (bytes <= 1 << 30) std::snprintf(text, sizeof text, "%.2f MiB", size / (1 << 20));
    else std::snprintf(text, sizeof text, "%.2f GiB", size / (1 << 30));
    return text;
  }

  [[noreturn]] void raise_out_of_memory(size_t requested) {
    const auto used = stats_.by_name["allocated_bytes"][0].current;
    const std::string allowed = allowed_ < 0 ? "" : size_text(allowed_) + " allowed; ";
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, is_rocm() ? "HIP" : "CUDA", " out of memory. Tried to allocate ",
        size_text(static_cast<int64_t>(requested)), ". GPU ", device_,
        " has a total capacity of ", size_text(limit_), " of which ",
        size_text(limit_ - taken_memory(static_cast<c10::DeviceIndex>(device_)) - reserved()),
        " is free. ", allowed,
        "Including non-PyTorch memory, this process has ", size_text(reserved()),
        " memory in use. Of the allocated memory ", size_text(used),
        " is allocated by PyTorch, and ", size_text(reserved() - used),
        " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        "setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)");
    std::abort();
  }

  int device_;
  int64_t limit_, allowed_ = -1;
  std::set<Chunk*, SmallestFirst> small_, large_;
  std::vector<Waiting> waiting_;
  std::map<char*, size_t> segments_;
  MemoryStats stats_;
};

static DeviceMemory& memory_of(int device) {
  static auto* all = [] {
    auto* made = new std::vector<DeviceMemory>();
    for (int i = 0; i < emulated_devices(); ++i) made->emplace_back(i);
    return made;
  }();
  return all->at(device);
}

static std::unordered_map<uint64_t, Block*>& live_blocks() {
  static auto* blocks = new std::unordered_map<uint64_t, Block*>();
  return *blocks;
}
Block* live_block(uint64_t id) {
  const auto found = live_blocks().find(id);
  return found == live_blocks().end() ? nullptr : found->second;
}

static void free_block(void* context) {
  if (is_forked_child()) return;  // the parent's memory: a child may not touch it
  auto* block = static_cast<Block*>(context);
  const Place place = here();
  Lock lock(state_mutex());
  live_blocks().erase(block->id);
  if (block->chunk) {
    note_freed(*block, block->chunk->is_large, place);
    memory_of(block->device).give_back(block->chunk, block->requested, block->recorded);
  }
  delete block;
}

c10::DataPtr allocate(size_t bytes, int device, Fill fill) {
  TORCH_CHECK(!is_forked_child(), "Cannot re-initialize CUDA in forked subprocess. To use CUDA "
              "with multiprocessing, you must use the 'spawn' start method");
  static uint64_t next_id = 1;
  Lock lock(state_mutex());
  auto block = std::make_unique<Block>();
  block->id = next_id++;
  block->requested = bytes;
  block->device = device;
  block->stream = current_stream(device);
  if (bytes) {
    block->chunk = memory_of(device).take(bytes, block->stream);
    block->address = block->chunk->address;
    check_reuse(*block, block->chunk->is_large);
    if (fill == Fill::poison && !block->chunk->is_poisoned)
      poison(block->address, block->chunk->bytes);
    block->chunk->is_poisoned = false;
    count_allocation();
  }
  live_blocks()[block->id] = block.get();
  auto* owned = block.release();
  return {owned->address, owned, &free_block,
          c10::Device(kCuda, static_cast<c10::DeviceIndex>(device))};
}

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}
void record_use(Block& block, StreamKey stream) {
  Lock lock(state_mutex());
  block.recorded.insert(stream);
}
int device_of_address(const char* address) {
  Lock lock(state_mutex());
  for (int device = 0; device < device_count(); ++device)
    if (memory_of(device).holds(address)) return device;
  return 0;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return emulated::allocate(bytes, current_device(), Fill::poison);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(kernel_view(to), kernel_view(from), bytes);
  }
};
c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceAllocator();
  return allocator;
}

// ---- what torch.cuda asks

void empty_cache() {
  Lock lock(state_mutex());
  for (int device = 0; device < device_count(); ++device) memory_of(device).release_cached();
}
void set_memory_fraction(int device, double fraction) {
  Lock lock(state_mutex());
  memory_of(device).set_fraction(fraction);
}
MemoryStats memory_stats(int device) {
  Lock lock(state_mutex());
  return memory_of(device).stats();
}
void reset_peak(int device) {
  Lock lock(state_mutex());
  for (auto& [name, pools] : memory_of(device).stats().by_name)
    for (auto& stat : pools) stat.peak = stat.current;
}
void reset_accumulated(int device) {
  Lock lock(state_mutex());
  auto& stats = memory_of(device).stats();
  for (auto& [name, pools] : stats.by_name)
    for (auto& stat : pools) stat.allocated = stat.freed = 0;
  for (auto& [name, number] : stats.numbers) number = 0;
}
int64_t memory_limit(int device) { return memory_of(device).limit(); }
int64_t memory_reserved(int device) {
  Lock lock(state_mutex());
  return memory_of(device).reserved();
}

}  // namespace emulated
