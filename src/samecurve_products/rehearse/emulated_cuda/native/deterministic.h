// Operators that have no deterministic kernel on CUDA, by torch's own list
// (the docstring of torch.use_deterministic_algorithms).
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace emulated {

// Raises or warns with torch's text, as torch.use_deterministic_algorithms asks.
void check_deterministic(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace emulated
