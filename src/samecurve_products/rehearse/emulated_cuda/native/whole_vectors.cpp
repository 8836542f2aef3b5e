#include "whole_vectors.h"

#include <ATen/ops/zeros.h>

namespace emulated {

using at::Tensor;

constexpr int64_t kVectorBytes = 64;  // of the widest vector instructions

WholeVectors::WholeVectors(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  const auto& name = schema.name();
  if (name.rfind("aten::_fused_ad", 0) != 0 && name.rfind("aten::_fused_sgd", 0) != 0) return;
  const size_t first = stack.size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& value = stack[first + i];
    if (!value.isTensorList()) continue;
    const auto* alias = schema.arguments()[i].alias_info();
    c10::List<Tensor> arrays;
    for (const auto& array : value.toTensorVector())
      arrays.push_back(filled_up(array, alias && alias->isWrite()));
    value = arrays;
  }
}

Tensor WholeVectors::filled_up(const Tensor& array, bool is_written) {
  const auto size = array.numel();
  const auto in_vector = kVectorBytes / static_cast<int64_t>(array.element_size());
  if (!array.dim() || size % in_vector == 0 || !array.is_non_overlapping_and_dense()) return array;
  const auto numbers = array.as_strided({size}, {1});  // as they lie in memory
  const auto whole = at::zeros({(size / in_vector + 1) * in_vector}, array.options());
  const auto copied = whole.narrow(0, 0, size);
  copied.copy_(numbers);
  if (is_written) written_.emplace_back(copied, numbers);
  return whole;
}

void WholeVectors::finish() {
  for (const auto& [copied, numbers] : written_) numbers.copy_(copied);
}

}  // namespace emulated
