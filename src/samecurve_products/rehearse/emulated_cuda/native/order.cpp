#include "order.h"

#include "arena.h"
#include "copies.h"
#include "faults.h"
#include "forward_lines.h"
#include "memory.h"
#include "settings.h"

#include <unordered_set>

namespace emulated {

const std::string* kept_name(const std::string& name) {
  static auto* names = new std::unordered_set<std::string>();
  Lock lock(state_mutex());
  return &*names->insert(name).first;
}

LaunchPointer launch_on(StreamKey stream, const std::string* name) {
  auto made = std::make_shared<Launch>();
  made->place = here();  // before the lock: it may run the garbage collector
  note_forward(made->place);
  made->stream = stream;
  made->name = name;
  Lock lock(state_mutex());
  made->time = tick(stream);
  return made;
}
LaunchPointer launch(int device, const std::string* name) {
  check_device(static_cast<c10::DeviceIndex>(device));
  return launch_on(current_stream(device), name);
}

static bool is_unordered(const Launch& later, const LaunchPointer& earlier) {
  return earlier && earlier.get() != &later &&
      !is_ordered(later.stream, earlier->stream, earlier->time);
}

static void report_race(const Launch& later, const char* does, const Launch& earlier,
                        const char* did, const Block& block) {
  add_finding("race", *later.name + " on " + name_of(later.stream) + " " + does + " what " +
                  *earlier.name + " on " + name_of(earlier.stream) + " " + did +
                  ", and nothing makes it wait (" + std::to_string(block.requested) +
                  " bytes); wait first: stream.wait_stream(other) or an event",
              later.place, earlier.place);
}

static void note_read(const LaunchPointer& launch, Block& block) {
  for (auto& reader : block.history.readers) {
    if (reader->stream != launch->stream) continue;
    reader = launch;
    return;
  }
  block.history.readers.push_back(launch);
}

static void note_write(const LaunchPointer& launch, Block& block) {
  block.history.readers.clear();
  block.history.writer = launch;
  if (!block.history.maker) block.history.maker = launch;
  launch->outputs.push_back(block.id);
}

bool touch(const LaunchPointer& launch, Block& block, bool writes) {
  Lock lock(state_mutex());
  auto& history = block.history;
  const auto writer = history.writer;
  const bool raced_with_writer = is_unordered(*launch, writer);
  if (raced_with_writer)
    report_race(*launch, writes ? "overwrites" : "reads", *writer, "writes", block);
  if (writes) {
    bool raced = raced_with_writer;
    for (const auto& reader : history.readers) {
      if (!is_unordered(*launch, reader)) continue;
      report_race(*launch, "overwrites", *reader, "reads", block);
      raced = true;
      break;
    }
    note_write(launch, block);
    if (raced) history.is_spoilt = true;
    return false;
  }
  check_late_sources(*launch, block);
  if (history.is_spoilt) {
    history.is_spoilt = false;
    poison(block.address, block.requested);
  }
  note_read(launch, block);
  return raced_with_writer;
}

// ---- memory that is freed on one stream and still used on another

struct Freed {
  StreamKey stream;
  bool is_large;
  size_t bytes;
  Place place;
  LaunchPointer maker;
  std::vector<LaunchPointer> readers;
  LaunchPointer writer;
};
static std::vector<Freed>& freed_blocks() {
  static auto* all = new std::vector<Freed>();
  return *all;
}

void note_freed(Block& block, bool is_large, const Place& place) {
  const auto may_still_run = [&](const LaunchPointer& use) {
    return use && use->stream != block.stream && !block.recorded.count(use->stream) &&
        !is_ordered(block.stream, use->stream, use->time);
  };
  Freed freed{block.stream, is_large, block.requested, place, block.history.maker, {}, {}};
  if (may_still_run(block.history.writer)) freed.writer = block.history.writer;
  for (const auto& reader : block.history.readers)
    if (may_still_run(reader)) freed.readers.push_back(reader);
  if (freed.writer || !freed.readers.empty()) freed_blocks().push_back(std::move(freed));
}

static void report_reuse(const Freed& freed, const Launch& use) {
  const auto made_at = freed.maker ? users_line(freed.maker->place) : "";
  add_finding("use_after_free",
              std::to_string(freed.bytes) + " bytes of " + name_of(freed.stream) +
                  (made_at.empty() ? "" : ", made at " + made_at + ",") + " were freed while " + *use.name + " on " + name_of(use.stream) +
                  " may still use them, and are handed out again; call "
                  "tensor.record_stream(stream) before the last reference goes",
              freed.place, use.place);
}

static void spoil_outputs(const Launch& launch) {
  for (const auto id : launch.outputs) {
    auto* block = live_block(id);
    if (block && block->history.writer.get() == &launch) block->history.is_spoilt = true;
  }
}

void check_reuse(Block& fresh, bool is_large) {
  auto& all = freed_blocks();
  for (size_t i = 0; i < all.size();) {
    if (all[i].stream != fresh.stream || all[i].is_large != is_large) {
      ++i;
      continue;
    }
    const Freed freed = std::move(all[i]);
    all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
    const auto late = [&](const LaunchPointer& use) {
      return use && !is_ordered(freed.stream, use->stream, use->time);
    };
    if (late(freed.writer)) {
      report_reuse(freed, *freed.writer);
      fresh.history.is_spoilt = true;
    }
    for (const auto& reader : freed.readers) {
      if (!late(reader)) continue;
      report_reuse(freed, *reader);
      spoil_outputs(*reader);
    }
  }
}

}  // namespace emulated
