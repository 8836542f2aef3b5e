#include "copies.h"

#include "arena.h"
#include "counts.h"
#include "kernel_call.h"
#include "memory.h"
#include "pinned.h"
#include "settings.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

namespace emulated {

using at::Tensor;

// An asynchronous copy that the host has not waited for.
// To the host: the bytes are here and the pinned target holds poison until they arrive.
// From the host: the bytes are what the pinned source held; it must hold them until the wait.
// Meanwhile the pinned memory is closed: to all of the host's accesses, or to its writes.
struct LateCopy {
  bool to_host;
  char* pinned;
  std::string bytes;
  LaunchPointer copy;
  uint64_t block = 0;  // the device's block that a copy from the host fills
  size_t offset = 0;   // of the copy's bytes in the block
  bool is_closed = true;
};

static std::vector<LateCopy>& late_copies() {
  static auto* all = new std::vector<LateCopy>();
  return *all;
}

static bool overlaps(const LateCopy& late, const char* start, size_t bytes) {
  return late.pinned < start + bytes && start < late.pinned + late.bytes.size();
}

static void close_to_host(const LateCopy& late) {
  if (!late.is_closed) return;
  const auto may = late.to_host ? HostMay::do_nothing : HostMay::only_read;
  let_host(may, late.pinned, late.bytes.size());
}

// Pinned memory for the emulator's own use. Afterwards it is closed as the copies want it that are
// on their way then. The lock is held.
class OpenForUs {
 public:
  OpenForUs(const char* start, size_t bytes) : start_(start), bytes_(bytes) {
    let_host(HostMay::read_and_write, start, bytes);
  }
  ~OpenForUs() {
    for (const auto& late : late_copies())
      if (overlaps(late, start_, bytes_)) close_to_host(late);
  }

 private:
  const char* start_;
  size_t bytes_;
};

static bool source_changed(const LateCopy& late) {
  const OpenForUs open(late.pinned, late.bytes.size());
  return std::memcmp(late.pinned, late.bytes.data(), late.bytes.size()) != 0;
}

static void report_changed_source(const LateCopy& late, const Place& now) {
  add_finding("pinned_source",
              "pinned memory was changed while a copy from it to " +
                  name_of(late.copy->stream) + " might not be done (" +
                  std::to_string(late.bytes.size()) +
                  " bytes); record an event after the copy and wait for it before you write",
              now, late.copy->place);
  auto* block = live_block(late.block);
  if (!block) return;
  poison(block->address + late.offset, late.bytes.size());
  for (const auto& reader : block->history.readers)
    for (const auto id : reader->outputs)
      if (auto* output = live_block(id))
        if (output->history.writer == reader) output->history.is_spoilt = true;
}

static void arrive(const LateCopy& late, const Place& now) {
  const OpenForUs open(late.pinned, late.bytes.size());
  if (late.to_host) std::memcpy(late.pinned, late.bytes.data(), late.bytes.size());
  else if (source_changed(late)) report_changed_source(late, now);
}

template <typename Condition>
static void finish_where(Condition is_done) {
  Place now;
  {
    Lock lock(state_mutex());
    if (late_copies().empty()) return;
  }
  now = here();
  Lock lock(state_mutex());
  auto& all = late_copies();
  std::vector<bool> are_done;
  for (const auto& late : all) are_done.push_back(is_done(late));
  std::vector<LateCopy> done, still;
  for (size_t i = 0; i < all.size(); ++i)
    (are_done[i] ? done : still).push_back(std::move(all[i]));
  all = std::move(still);
  for (const auto& late : done) arrive(late, now);
}

void settle_late_copies() {
  finish_where([](const LateCopy& late) {
    return host_has_waited(late.copy->stream, late.copy->time);
  });
}

void forget_late_copies(const char* pinned, size_t bytes) {
  finish_where([&](const LateCopy& late) { return overlaps(late, pinned, bytes); });
}

// Before a device's kernel uses the block: were the sources of its copies left alone until now?
static void check_sources_on(StreamKey stream, const char* pinned, size_t bytes) {
  finish_where([&](const LateCopy& late) {
    if (late.to_host || !overlaps(late, pinned, bytes)) return false;
    return is_ordered(stream, late.copy->stream, late.copy->time) || source_changed(late);
  });
}

static bool is_direct(const Tensor& to, const Tensor& from) {
  return to.dtype() == from.dtype() && to.sizes() == from.sizes() &&
      to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
      to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

// Removes a copy, and opens its pinned memory to the host.
static LateCopy take(size_t number) {
  auto& all = late_copies();
  LateCopy late = std::move(all[number]);
  all.erase(all.begin() + static_cast<std::ptrdiff_t>(number));
  const OpenForUs open(late.pinned, late.bytes.size());
  return late;
}

void check_late_sources(const Launch& reader, const Block& block) {
  auto& all = late_copies();
  for (size_t i = 0; i < all.size();) {
    if (all[i].to_host || all[i].block != block.id || !source_changed(all[i])) {
      ++i;
      continue;
    }
    const LateCopy late = take(i);
    report_changed_source(late, reader.place);
  }
}

static void report_early_access(const LateCopy& late, const Place& now) {
  add_finding("late_copy",
              "the host uses pinned memory while a copy to it from " +
                  name_of(late.copy->stream) + " may not have arrived (" +
                  std::to_string(late.bytes.size()) +
                  " bytes); wait first: event.synchronize() after the copy",
              now, late.copy->place);
}

bool note_early_access(const char* address) {
  Lock lock(state_mutex());
  auto& all = late_copies();
  const auto is_touched = [&](const LateCopy& late) {
    return late.is_closed && overlaps(late, address, 1);
  };
  if (std::none_of(all.begin(), all.end(), is_touched)) return false;
  const Place now = here();
  for (size_t i = 0; i < all.size();) {
    if (!is_touched(all[i])) {
      ++i;
    } else if (all[i].to_host) {  // poison stays there until the copy arrives
      all[i].is_closed = false;
      let_host(HostMay::read_and_write, all[i].pinned, all[i].bytes.size());
      report_early_access(all[i++], now);
    } else {
      report_changed_source(take(i), now);
    }
  }
  return true;
}

void wait_on_host(StreamKey stream) {
  {
    Lock lock(state_mutex());
    host_waits_for(stream);
  }
  settle_late_copies();
}

static const std::string* copy_name() {
  static const auto* name = kept_name("aten::copy_");
  return name;
}

// What stands in pinned memory for a copy on this stream: an earlier copy to the host, ordered
// before this one, has arrived for it, though the host may not read it yet.
class ArrivedForStream {
 public:
  ArrivedForStream(StreamKey stream, char* pinned, size_t bytes) {
    Lock lock(state_mutex());
    for (auto& late : late_copies()) {
      if (!late.to_host || !overlaps(late, pinned, bytes)) continue;
      if (!is_ordered(stream, late.copy->stream, late.copy->time)) continue;
      let_host(HostMay::read_and_write, late.pinned, late.bytes.size());
      std::memcpy(late.pinned, late.bytes.data(), late.bytes.size());
      arrived_.emplace_back(late.pinned, late.bytes.size());
    }
  }
  ~ArrivedForStream() {
    Lock lock(state_mutex());
    for (const auto& [pinned, bytes] : arrived_) {
      const OpenForUs open(pinned, bytes);
      std::memset(pinned, kPoison, bytes);
    }
  }
  bool any() const { return !arrived_.empty(); }

 private:
  std::vector<std::pair<char*, size_t>> arrived_;
};

static void copy_from_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  const int device = to.device().index();
  const bool pinned = is_pinned(from.storage().data());
  const bool waits = !(pinned && non_blocking);
  count_way(Way::from_host);
  if (!pinned && from.numel() > 1) count_way(Way::from_pageable_host);
  KernelCall call(device, copy_name());
  auto target = call.argument(to, true);
  auto* bytes = static_cast<char*>(from.data_ptr());
  const bool is_by_device = pinned && is_direct(to, from) && from.numel() > 0;
  const bool late = !waits && is_by_device;
  {
    ArrivedForStream arrived(call.noted()->stream, bytes, is_by_device ? from.nbytes() : 0);
    target.copy_(from);
    if (late && !arrived.any()) {
      auto* block = block_of(to);
      Lock lock(state_mutex());
      const OpenForUs closed_after(bytes, from.nbytes());
      late_copies().push_back(LateCopy{false, bytes, std::string(bytes, from.nbytes()),
                                       call.noted(), block->id,
                                       to.storage_offset() * to.element_size()});
    }
  }
  if (waits && (pinned || !non_blocking)) wait_on_host(call.noted()->stream);
  if (waits) note_host_sync(pinned ? "copy_ H2D blocking (pinned)" : "copy_ H2D pageable", true);
  else if (!late && from.numel()) note_host_sync("copy_ H2D strided", false);
}

static void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  const int device = from.device().index();
  const bool pinned = is_pinned(to.storage().data());
  const bool waits = !(pinned && non_blocking);
  count_way(Way::to_host);
  if (waits) wait_on_host(current_stream(device));
  KernelCall call(device, copy_name());
  auto source = call.argument(from, false);
  if (waits) {
    to.copy_(source);
    wait_on_host(call.noted()->stream);
    note_host_sync(pinned ? "copy_ D2H blocking (pinned)" : "copy_ D2H pageable", true);
    return;
  }
  if (!to.is_non_overlapping_and_dense() || !to.numel()) {
    to.copy_(source);
    return;
  }
  auto arriving = at::empty_like(to);
  arriving.copy_(source);
  auto* bytes = static_cast<char*>(to.data_ptr());
  check_sources_on(call.noted()->stream, bytes, to.nbytes());
  Lock lock(state_mutex());
  const OpenForUs open(bytes, to.nbytes());
  std::memset(bytes, kPoison, to.nbytes());
  std::string held(static_cast<char*>(arriving.data_ptr()), arriving.nbytes());
  late_copies().push_back(LateCopy{true, bytes, std::move(held), call.noted()});
}

// As CUDA: between devices, both current streams wait for each other.
static void copy_on_devices(const Tensor& to, const Tensor& from) {
  const int source = from.device().index(), target = to.device().index();
  if (source != target) {
    Lock lock(state_mutex());
    wait_for_stream(current_stream(source), current_stream(target));
  }
  KernelCall call(source, copy_name());
  auto read = call.argument(from, false);
  auto write = call.alias(to);
  if (to.numel()) touch(call.noted(), *block_of(to), true);
  write.copy_(read);
  if (source != target) {
    Lock lock(state_mutex());
    wait_for_stream(current_stream(target), current_stream(source));
  }
}

static Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (self.is_same(from)) return self;
  TORCH_CHECK(!from.is_meta() && !self.is_meta(), "Cannot copy out of meta tensor; no data!");
  count_operation();
  const auto bytes = self.numel() * static_cast<int64_t>(self.element_size());
  const auto source = from.expand(self.sizes());
  if (!from.is_cuda()) {
    count_copy("copy H2D", bytes);
    copy_from_host(self, source, non_blocking);
  } else if (!self.is_cuda()) {
    count_copy("copy D2H", bytes);
    copy_to_host(self, source, non_blocking);
  } else {
    const auto read = from.numel() * static_cast<int64_t>(from.element_size());
    count_copy(from.dtype() == self.dtype() ? "copy D2D" : "cast D2D", bytes + read);
    copy_on_devices(self, source);
  }
  return self;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("copy_", &copy_); }

}  // namespace emulated
