// Which form of attention CUDA would run.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace emulated {

int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped);

}  // namespace emulated
