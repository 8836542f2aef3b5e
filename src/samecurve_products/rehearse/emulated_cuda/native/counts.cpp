#include "counts.h"

#include "findings.h"
#include "settings.h"

#include <atomic>

namespace emulated {

static Counts counted;
static std::atomic<bool> counting{false}, lines_wanted{false};

void start_counting(bool on, bool with_lines) {
  Lock lock(state_mutex());
  counting = on;
  lines_wanted = with_lines;
  counted.calls.clear();
  counted.launches.clear();
  counted.bytes.clear();
  counted.syncs_by_kind.clear();
  counted.syncs_by_line.clear();
  counted.allocations = 0;
}
bool is_counting() { return counting; }
Counts counts() {
  Lock lock(state_mutex());
  return counted;
}

void count_operation() {
  Lock lock(state_mutex());
  ++counted.operations;
}
void count_call(const std::string& name, int64_t launches, int64_t bytes) {
  if (!counting) return;
  Lock lock(state_mutex());
  ++counted.calls[name];
  counted.launches[name] += launches;
  counted.bytes[name] += bytes;
}
void count_copy(const char* way, int64_t bytes) {
  if (!counting) return;
  Lock lock(state_mutex());
  ++counted.launches[way];
  counted.bytes[way] += bytes;
}
void count_sync(const char* what) {
  std::string line;
  if (lines_wanted || report_folder()) {
    line = what;
    for (const auto& one : lines(here())) line += "\n" + one;
  }
  Lock lock(state_mutex());
  ++counted.syncs;
  if (counting) ++counted.syncs_by_kind[what];
  if (!line.empty()) ++counted.syncs_by_line[line];
}
void count_allocation() {
  Lock lock(state_mutex());
  ++counted.allocations;
}
void count_way(Way way) {
  Lock lock(state_mutex());
  if (way == Way::from_host) ++counted.from_host;
  if (way == Way::from_pageable_host) ++counted.from_pageable_host;
  if (way == Way::to_host) ++counted.to_host;
}

}  // namespace emulated
