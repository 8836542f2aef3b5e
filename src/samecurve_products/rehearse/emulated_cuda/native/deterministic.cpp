#include "deterministic.h"

#include "findings.h"

#include <ATen/Context.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <unordered_map>

namespace emulated {

using Arguments = c10::ArrayRef<c10::IValue>;

struct Rule {
  const char* caller;  // the name in torch's message
  std::function<bool(Arguments, const std::string& overload)> applies;
};

static bool always(Arguments, const std::string&) { return true; }
static bool is_floating(Arguments arguments, const std::string&) {
  const auto type = arguments[0].toTensor().scalar_type();
  return at::isFloatingType(type) || at::isComplexType(type);
}
static bool has_indices(Arguments, const std::string& overload) { return !overload.empty(); }
static bool has_weights(Arguments arguments, const std::string&) {
  return arguments[1].isTensor() && arguments[1].toTensor().defined();
}
static bool is_reduced(Arguments arguments, const std::string&) {
  return arguments[3].toInt() != at::Reduction::None;
}
static bool is_product(Arguments arguments, const std::string&) {
  for (const auto& argument : arguments)
    if (argument.isString() && argument.toStringRef() == "prod") return true;
  return false;
}

// Source: as samecurve/core/nondeterministic.py has it, the calls of alertNotDeterministic in torch's
// CUDA builds. torch's docstring lists more (float cumsum, kthvalue): those do not raise in 2.13.
static const std::unordered_map<std::string, Rule>& rules() {
  static const auto* all = new std::unordered_map<std::string, Rule>{
      {"aten::avg_pool3d_backward", {"avg_pool3d_backward_cuda", always}},
      {"aten::_adaptive_avg_pool2d_backward", {"adaptive_avg_pool2d_backward_cuda", always}},
      {"aten::_adaptive_avg_pool3d_backward", {"adaptive_avg_pool3d_backward_cuda", always}},
      {"aten::adaptive_max_pool2d_backward", {"adaptive_max_pool2d_backward_cuda", always}},
      {"aten::fractional_max_pool2d_backward", {"fractional_max_pool2d_backward_cuda", always}},
      {"aten::fractional_max_pool3d_backward", {"fractional_max_pool3d_backward_cuda", always}},
      {"aten::max_unpool2d", {"max_unpooling2d_forward_out", always}},
      {"aten::max_unpool3d", {"max_unpooling3d_forward_out", always}},
      {"aten::upsample_linear1d_backward", {"upsample_linear1d_backward_out_cuda", always}},
      {"aten::upsample_bilinear2d_backward", {"upsample_bilinear2d_backward_out_cuda", always}},
      {"aten::upsample_bicubic2d_backward", {"upsample_bicubic2d_backward_out_cuda", always}},
      {"aten::upsample_trilinear3d_backward", {"upsample_trilinear3d_backward_out_cuda", always}},
      {"aten::_upsample_bilinear2d_aa_backward", {"upsample_gen2d_aa_backward_out_cuda", always}},
      {"aten::_upsample_bicubic2d_aa_backward", {"upsample_gen2d_aa_backward_out_cuda", always}},
      {"aten::reflection_pad1d_backward", {"reflection_pad1d_backward_out_cuda", always}},
      {"aten::reflection_pad3d_backward", {"reflection_pad3d_backward_out_cuda", always}},
      {"aten::nll_loss2d_forward", {"nll_loss2d_forward_out_cuda_template", is_reduced}},
      {"aten::_ctc_loss_backward", {"ctc_loss_backward_gpu", always}},
      {"aten::grid_sampler_2d_backward", {"grid_sampler_2d_backward_cuda", always}},
      {"aten::grid_sampler_3d_backward", {"grid_sampler_3d_backward_cuda", always}},
      {"aten::put_", {"put_", always}},
      {"aten::median", {"median CUDA with indices output", has_indices}},
      {"aten::nanmedian", {"median CUDA with indices output", has_indices}},
      {"aten::histc", {"_histc_cuda", is_floating}},
      {"aten::bincount", {"_bincount_cuda", has_weights}},
      {"aten::scatter_reduce", {"scatter_reduce_cuda", is_product}},
      {"aten::scatter_reduce_", {"scatter_reduce_cuda", is_product}},
      {"aten::_embedding_bag_backward",
       {"embedding_bag_backward_cuda_max",
        [](Arguments arguments, const std::string&) { return arguments[8].toInt() == 2; }}},
      {"aten::_embedding_bag_dense_backward",
       {"embedding_bag_backward_cuda_max",
        [](Arguments arguments, const std::string&) { return arguments[7].toInt() == 2; }}},
  };
  return *all;
}

void check_deterministic(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  auto& context = at::globalContext();
  if (!context.deterministicAlgorithms()) return;
  const auto rule = rules().find(op.schema().name());
  if (rule == rules().end()) return;
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  if (!rule->second.applies(arguments, op.schema().overload_name())) return;
  const std::string caller = rule->second.caller;
  add_finding("not_deterministic", op.schema().name() + " has no deterministic kernel on CUDA (" +
                  caller + ")", here());
  context.alertNotDeterministic(caller);
}

}  // namespace emulated
