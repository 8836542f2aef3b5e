#include "forward_lines.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/node.h>

#include <mutex>
#include <unordered_map>
#include <vector>

namespace emulated {

constexpr size_t kKept = 1 << 13;  // nodes of one thread; older ones have no lines

struct Noted {
  uint64_t number = UINT64_MAX;
  Place place;
};
using Lines = std::vector<Noted>;  // by number, modulo kKept

static std::mutex& guard() {
  static auto* made = new std::mutex();
  return *made;
}
static std::unordered_map<uint64_t, Lines*>& by_thread() {
  static auto* all = new std::unordered_map<uint64_t, Lines*>();
  return *all;
}

static Lines& lines_of_this_thread() {
  static thread_local Lines* lines = nullptr;
  if (lines) return *lines;
  lines = new Lines(kKept);  // for ever: a backward pass may come after the thread
  std::lock_guard<std::mutex> lock(guard());
  by_thread()[at::RecordFunction::currentThreadId()] = lines;
  return *lines;
}

// autograd makes an operation's node before it calls the kernel. So the first kernel after a node
// was made is that of the node's operation.
void note_forward(const Place& place) {
  if (!place.count || place.is_backward || !c10::GradMode::is_enabled()) return;
  const auto made = at::sequence_number::peek();
  if (!made) return;
  auto& noted = lines_of_this_thread()[(made - 1) % kKept];
  if (noted.number != made - 1) noted = {made - 1, place};
}

Place forward_of_this_node() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return {};
  std::lock_guard<std::mutex> lock(guard());
  const auto found = by_thread().find(node->thread_id());
  if (found == by_thread().end()) return {};
  const auto& noted = (*found->second)[node->sequence_nr() % kKept];
  if (noted.number != node->sequence_nr()) return {};
  Place place = noted.place;
  place.is_backward = true;
  return place;
}

}  // namespace emulated
