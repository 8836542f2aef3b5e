// Dtypes that CUDA's kernels take and the CPU's do not.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

namespace emulated {

// Changes the arguments of such an operator for the CPU's kernel, and then its results.
class Adaptation {
 public:
  Adaptation(const c10::FunctionSchema& schema, torch::jit::Stack& stack);
  void finish(torch::jit::Stack& stack);

 private:
  void for_histc(torch::jit::Stack& stack, size_t first);
  void for_softmax(torch::jit::Stack& stack, size_t first);
  void for_softmax_backward(const std::string& overload, torch::jit::Stack& stack, size_t first);

  c10::ScalarType result_dtype_ = c10::ScalarType::Undefined;
  at::Tensor out_, out_in_stead_;
};

}  // namespace emulated
