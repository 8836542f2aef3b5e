// What a stretch of a program launched, copied, allocated and waited for.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace emulated {

struct Counts {
  int64_t operations = 0, syncs = 0, from_host = 0, from_pageable_host = 0, to_host = 0;
  int64_t allocations = 0;
  std::map<std::string, int64_t> calls;     // by operator and overload
  std::map<std::string, int64_t> launches;  // as CUDA launches: a foreach operator in its chunks
  std::map<std::string, int64_t> bytes;     // moved, by operator or way of copying
  std::map<std::string, int64_t> syncs_by_kind, syncs_by_line;
};

void start_counting(bool on, bool with_lines);  // forgets what was counted before
bool is_counting();
Counts counts();

void count_operation();
void count_call(const std::string& name, int64_t launches, int64_t bytes);
void count_copy(const char* way, int64_t bytes);
void count_sync(const char* what);
void count_allocation();
enum class Way { from_host, from_pageable_host, to_host };
void count_way(Way way);

}  // namespace emulated
