// Fused optimizers: CUDA's kernels compute each number alike, the CPU's the last few of an array
// in another way, so that arrays which are cut elsewhere would get other bits.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <utility>
#include <vector>

namespace emulated {

// Gives the CPU's kernel copies of such arrays, which whole vectors fill, and takes back what it
// wrote into them.
class WholeVectors {
 public:
  WholeVectors(const c10::FunctionSchema& schema, torch::jit::Stack& stack);
  void finish();

 private:
  at::Tensor filled_up(const at::Tensor& array, bool is_written);

  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // numbers of the copy, of the array
};

}  // namespace emulated
