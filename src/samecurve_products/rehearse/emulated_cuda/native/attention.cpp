// Fused attention as CUDA chooses it: flash for half precision without a mask, memory-efficient
// with a mask or in f32, else the math form. The CPU's flash kernel computes both.
#include "attention.h"

#include "counts.h"
#include "kernel_call.h"
#include "settings.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <initializer_list>

namespace emulated {

using at::Tensor;
using Mask = std::optional<Tensor>;
using Scale = std::optional<double>;

enum Choice : int64_t { math = 0, flash = 1, efficient = 2 };

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const Mask& mask, double dropout, bool, Scale, bool) {
  const auto& context = at::globalContext();
  const auto dtype = query.scalar_type();
  const bool is_half = dtype == at::kBFloat16 || dtype == at::kHalf;
  const bool has_mask = mask && mask->defined();
  if (dropout > 0 || query.dim() != 4) return math;  // the CPU's kernel has no dropout
  const bool same_width = query.size(-1) == value.size(-1);
  if (is_half && !has_mask && context.userEnabledFlashSDP() && same_width && query.size(-1) <= 256)
    return flash;
  const bool same_heads = query.size(1) == key.size(1);
  const bool mask_learns = has_mask && mask->requires_grad();
  if (context.userEnabledMemEfficientSDP() && same_heads && same_width && !mask_learns &&
      (is_half || dtype == at::kFloat))
    return efficient;
  return math;
}

static int64_t bytes_of(std::initializer_list<const Tensor*> tensors) {
  int64_t bytes = 0;
  for (const auto* tensor : tensors)
    if (tensor->defined())
      bytes += tensor->numel() * static_cast<int64_t>(tensor->element_size());
  return bytes;
}

// Grouped queries: each head of keys serves several heads of queries.
static Tensor spread_heads(const Tensor& tensor, int64_t heads) {
  return tensor.size(1) == heads ? tensor : tensor.repeat_interleave(heads / tensor.size(1), 1);
}
static Tensor sum_heads(const Tensor& tensor, int64_t heads) {
  if (tensor.size(1) == heads) return tensor;
  return tensor.reshape({tensor.size(0), heads, tensor.size(1) / heads, tensor.size(2),
                         tensor.size(3)}).sum(2);
}

static Mask mask_for_cpu(KernelCall& call, const Mask& mask, at::ScalarType dtype) {
  if (!mask || !mask->defined()) return std::nullopt;
  auto given = call.argument(*mask, false);
  const bool is_taken = given.scalar_type() == dtype || given.scalar_type() == at::kFloat;
  return is_taken ? given : given.to(at::kFloat);
}

struct Heads {
  Tensor output, log_sum;
};

static Heads forward(const std::string* name, const Tensor& query, const Tensor& key,
                     const Tensor& value, const Mask& mask, bool causal, Scale scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  KernelCall call(query.device().index(), name);
  const auto heads = query.size(1);
  auto [output, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      call.argument(query, false), spread_heads(call.argument(key, false), heads),
      spread_heads(call.argument(value, false), heads), 0.0, causal,
      mask_for_cpu(call, mask, query.scalar_type()), scale);
  Heads result{call.result(output), call.result(log_sum)};
  count_operation();
  count_call(*name, 1, bytes_of({&query, &key, &value, &result.output, &result.log_sum}));
  return result;
}

struct Saved {
  const Tensor &gradient, &query, &key, &value, &output, &log_sum;
};

static std::tuple<Tensor, Tensor, Tensor> backward(const std::string* name, const Saved& saved,
                                                   const Mask& mask, bool causal, Scale scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  KernelCall call(saved.query.device().index(), name);
  const auto heads = saved.query.size(1);
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      call.argument(saved.gradient, false), call.argument(saved.query, false),
      spread_heads(call.argument(saved.key, false), heads),
      spread_heads(call.argument(saved.value, false), heads), call.argument(saved.output, false),
      call.argument(saved.log_sum, false), 0.0, causal,
      mask_for_cpu(call, mask, saved.query.scalar_type()), scale);
  auto query = call.result(of_query);
  auto key = call.result(sum_heads(of_key, saved.key.size(1)));
  auto value = call.result(sum_heads(of_value, saved.value.size(1)));
  count_operation();
  count_call(*name, 1,
             bytes_of({&saved.gradient, &saved.query, &saved.key, &saved.value, &saved.output,
                       &query, &key, &value}));
  return {query, key, value};
}

static Tensor no_seed(const Tensor& like) {
  return at::empty({0}, like.options().dtype(at::kLong));
}

static std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
flash_forward(const Tensor& query, const Tensor& key, const Tensor& value, double, bool causal,
              bool, Scale scale) {
  static const auto* name = kept_name("flash_attention");
  auto [output, log_sum] = forward(name, query, key, value, std::nullopt, causal, scale);
  return {output, log_sum, Tensor(), Tensor(), c10::SymInt(query.size(2)),
          c10::SymInt(key.size(2)), no_seed(query), no_seed(query), no_seed(query)};
}

static std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, const Tensor& log_sum, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double, bool causal, const Tensor&, const Tensor&, Scale scale) {
  static const auto* name = kept_name("flash_attention_backward");
  return backward(name, {gradient, query, key, value, output, log_sum}, std::nullopt, causal,
                  scale);
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, bool, double,
    bool causal, Scale scale) {
  static const auto* name = kept_name("efficient_attention");
  auto [output, log_sum] = forward(name, query, key, value, mask, causal, scale);
  return {output, log_sum, no_seed(query), no_seed(query)};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& mask, const Tensor& output, const Tensor& log_sum, const Tensor&, const Tensor&,
    double, std::array<bool, 4>, bool causal, Scale scale) {
  static const auto* name = kept_name("efficient_attention_backward");
  const Mask given = mask.defined() ? Mask(mask) : std::nullopt;
  auto [of_query, of_key, of_value] =
      backward(name, {gradient, query, key, value, output, log_sum}, given, causal, scale);
  return {of_query, of_key, of_value, Tensor()};
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_fused_sdp_choice", &choose_attention);
  library.impl("_scaled_dot_product_flash_attention", &flash_forward);
  library.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  library.impl("_scaled_dot_product_efficient_attention", &efficient_forward);
  library.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
}

}  // namespace emulated
