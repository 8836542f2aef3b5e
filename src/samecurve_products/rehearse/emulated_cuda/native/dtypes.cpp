#include "dtypes.h"

#include <ATen/ops/empty_like.h>

namespace emulated {

Adaptation::Adaptation(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  const auto& name = schema.name();
  const size_t first = stack.size() - schema.arguments().size();
  if (name == "aten::histc" && schema.overload_name().empty()) for_histc(stack, first);
  if (name == "aten::_softmax" || name == "aten::_log_softmax") for_softmax(stack, first);
  if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data")
    for_softmax_backward(schema.overload_name(), stack, first);
}

// CUDA counts integers, too.
void Adaptation::for_histc(torch::jit::Stack& stack, size_t first) {
  const auto values = stack[first].toTensor();
  if (values.is_floating_point()) return;
  result_dtype_ = values.scalar_type();
  stack[first] = values.to(at::kFloat);
}

// half_to_float: one kernel on CUDA, a cast and a kernel here.
void Adaptation::for_softmax(torch::jit::Stack& stack, size_t first) {
  if (!stack[first + 2].toBool()) return;
  stack[first] = stack[first].toTensor().to(at::kFloat);
  stack[first + 2] = false;
}

void Adaptation::for_softmax_backward(const std::string& overload, torch::jit::Stack& stack,
                                      size_t first) {
  const auto gradient_dtype = stack[first].toTensor().scalar_type();
  const auto input_dtype = static_cast<c10::ScalarType>(stack[first + 3].toInt());
  if (input_dtype == gradient_dtype) return;
  stack[first + 3] = static_cast<int64_t>(gradient_dtype);
  if (overload == "out") {
    out_ = stack[first + 4].toTensor();
    out_in_stead_ = at::empty_like(out_, out_.options().dtype(gradient_dtype));
    stack[first + 4] = out_in_stead_;
  } else {
    result_dtype_ = input_dtype;
  }
}

void Adaptation::finish(torch::jit::Stack& stack) {
  if (result_dtype_ != c10::ScalarType::Undefined)
    stack.back() = stack.back().toTensor().to(result_dtype_);
  if (out_.defined()) {
    out_.copy_(out_in_stead_);
    stack.back() = out_;
  }
}

}  // namespace emulated
