#include "deterministic.h"

#include "findings.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <unordered_map>

namespace emulated {

struct Rule {
  std::string overload, alert, text, argument;
  std::vector<std::string> values;
};

// By the operator's whole name, in place and not.
static std::unordered_multimap<std::string, Rule>& rules() {
  static auto* all = new std::unordered_multimap<std::string, Rule>();
  return *all;
}

void set_nondeterministic(const std::vector<Nondeterministic>& list) {
  rules().clear();
  for (const auto& [name, overload, alert, text, argument, values] : list)
    for (const auto* ending : {"", "_"})
      rules().emplace("aten::" + name + ending, Rule{overload, alert, text, argument, values});
}

static std::string in_words(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    const auto dtype = value.toTensor().scalar_type();
    return at::isFloatingType(dtype) || at::isComplexType(dtype) ? "floats" : "integers";
  }
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isString()) return value.toStringRef();
  return "none";
}

static bool applies(const Rule& rule, const c10::FunctionSchema& schema,
                    c10::ArrayRef<c10::IValue> arguments) {
  if (schema.overload_name().rfind(rule.overload, 0) != 0) return false;
  if (rule.argument.empty()) return true;
  const auto place = schema.argumentIndexWithName(rule.argument);
  if (!place) return false;
  const auto& values = rule.values;
  return std::find(values.begin(), values.end(), in_words(arguments[*place])) != values.end();
}

void check_deterministic(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto [first, last] = rules().equal_range(op.schema().name());
  if (first == last) return;
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  for (auto rule = first; rule != last; ++rule) {
    if (!applies(rule->second, op.schema(), arguments)) continue;
    add_finding("not_deterministic", rule->second.text, here());
    at::globalContext().alertNotDeterministic(rule->second.alert);
    return;
  }
}

}  // namespace emulated
