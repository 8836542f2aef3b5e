#include "pinned.h"

#include "copies.h"
#include "settings.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

namespace emulated {

static size_t page_size() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}
static size_t whole_pages(size_t bytes) {
  return std::max<size_t>((bytes + page_size() - 1) / page_size(), 1) * page_size();
}

// The bytes that were asked for, by address. Each range has pages of its own.
static std::map<const char*, size_t>& ranges() {
  static auto* all = new std::map<const char*, size_t>();
  return *all;
}
static std::map<const char*, size_t>::iterator range_of(const char* address) {
  auto above = ranges().upper_bound(address);
  if (above == ranges().begin()) return ranges().end();
  --above;
  return address < above->first + whole_pages(above->second) ? above : ranges().end();
}
bool is_pinned(const void* address) {
  Lock lock(state_mutex());
  return range_of(static_cast<const char*>(address)) != ranges().end();
}

void let_host(HostMay may, const char* pinned, size_t bytes) {
  const auto range = range_of(pinned);
  if (range == ranges().end() || !bytes) return;
  const auto [start, asked] = *range;
  const auto begin = whole_pages(static_cast<size_t>(pinned - start) + 1) - page_size();
  const bool begins_a_page = start + begin == pinned;
  const char* first = begins_a_page ? pinned : start + begin + page_size();
  const bool ends_the_range = pinned + bytes >= start + asked;
  const auto end = static_cast<size_t>(pinned + bytes - start);
  const char* last = start + (ends_the_range ? whole_pages(asked) : end / page_size() * page_size());
  if (first >= last) return;
  const int access = may == HostMay::do_nothing ? PROT_NONE
      : may == HostMay::only_read ? PROT_READ : PROT_READ | PROT_WRITE;
  mprotect(const_cast<char*>(first), static_cast<size_t>(last - first), access);
}

// torch keeps freed pinned memory until the copies from it are done: to free it is no fault.
static void free_pinned(void* address) {
  const auto* start = static_cast<const char*>(address);
  Lock lock(state_mutex());
  const auto found = ranges().find(start);
  const size_t bytes = whole_pages(found->second);
  forget_late_copies(start, bytes);
  ranges().erase(found);
  munmap(address, bytes);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "no memory for ", bytes, " bytes of pinned memory");
    Lock lock(state_mutex());
    ranges()[static_cast<const char*>(address)] = bytes;
    return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
at::HostAllocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return allocator;
}

}  // namespace emulated
