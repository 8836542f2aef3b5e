// Operators that have no deterministic kernel on CUDA. Python gives the list: samecurve's own
// (core/nondeterministic.py), so that what a plan refuses and what raises here are the same.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <tuple>
#include <vector>

namespace emulated {

// The operator without "aten::" and without the "_" of its form in place; how an overload of it
// begins ("": any); what torch's error calls it; what a finding says; an argument and its values
// that are meant ("": all calls are).
using Nondeterministic = std::tuple<std::string, std::string, std::string, std::string, std::string,
                                    std::vector<std::string>>;
void set_nondeterministic(const std::vector<Nondeterministic>& list);

// Notes a finding for a call of one of these. Raises or warns with torch's text where
// torch.use_deterministic_algorithms asks for it.
void check_deterministic(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace emulated
