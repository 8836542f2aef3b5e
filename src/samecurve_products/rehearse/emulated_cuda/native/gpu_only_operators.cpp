// CPU kernels of operators that torch has for CUDA alone: the cells of LSTM and GRU, SyncBatchNorm,
// the backward pass of RMSNorm. The fallback of operators.cpp then runs them as any other.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/var_mean.h>
#include <torch/library.h>

#include <array>
#include <numeric>
#include <string>

namespace emulated {

using at::Tensor;
using Optional = std::optional<Tensor>;

static bool is_given(const Optional& tensor) { return tensor && tensor->defined(); }

// CUDA's kernels compute in f32 what they read and write in half precision.
static Tensor wide(const Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
}
static Tensor plus(const Tensor& tensor, const Optional& other) {
  return is_given(other) ? tensor + wide(*other) : tensor;
}

// ---- recurrent cells

static std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& cell_before,
    const Optional& input_bias, const Optional& hidden_bias) {
  const auto gates =
      plus(plus(wide(from_input) + wide(from_hidden), input_bias), hidden_bias).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), fresh = gates[2].tanh(),
             out = gates[3].sigmoid();
  const auto cell = forget * wide(cell_before) + in * fresh;
  const auto dtype = cell_before.scalar_type();
  return {(out * cell.tanh()).to(dtype), cell.to(dtype),
          at::cat({in, forget, fresh, out}, 1).to(dtype)};
}

static std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Optional& of_hidden, const Optional& of_cell, const Tensor& cell_before,
    const Tensor& cell, const Tensor& workspace, bool has_bias) {
  if (!is_given(of_hidden) && !is_given(of_cell)) return {};
  const auto gates = wide(workspace).chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &fresh = gates[2], &out = gates[3];
  const auto bent = wide(cell).tanh();
  const auto hidden = is_given(of_hidden) ? wide(*of_hidden) : bent.new_zeros(bent.sizes());
  const auto through = plus(hidden * out * (1 - bent * bent), of_cell);
  const auto of_gates =
      at::cat({through * fresh * in * (1 - in),
               through * wide(cell_before) * forget * (1 - forget),
               through * in * (1 - fresh * fresh), hidden * bent * out * (1 - out)}, 1)
          .to(workspace.scalar_type());
  return {of_gates, (through * forget).to(cell.scalar_type()),
          has_bias ? of_gates.sum(0) : Tensor()};
}

static std::tuple<Tensor, Tensor> gru_cell(const Tensor& from_input, const Tensor& from_hidden,
                                           const Tensor& before, const Optional& input_bias,
                                           const Optional& hidden_bias) {
  const auto input = plus(wide(from_input), input_bias).chunk(3, 1);
  const auto hidden = plus(wide(from_hidden), hidden_bias).chunk(3, 1);
  const auto reset = (input[0] + hidden[0]).sigmoid(), keep = (input[1] + hidden[1]).sigmoid();
  const auto fresh = (input[2] + reset * hidden[2]).tanh(), old = wide(before);
  const auto dtype = before.scalar_type();
  return {(fresh + keep * (old - fresh)).to(dtype),
          at::cat({reset, keep, fresh, old, hidden[2]}, 1).to(dtype)};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& gradient, const Tensor& workspace, bool has_bias) {
  const auto saved = wide(workspace).chunk(5, 1);
  const auto &reset = saved[0], &keep = saved[1], &fresh = saved[2], &old = saved[3];
  const auto given = wide(gradient);
  const auto of_keep = given * (old - fresh) * (1 - keep) * keep;
  const auto of_fresh = given * (1 - keep) * (1 - fresh * fresh);
  const auto of_reset = of_fresh * saved[4] * (1 - reset) * reset;
  const auto dtype = workspace.scalar_type();
  const auto input = at::cat({of_reset, of_keep, of_fresh}, 1).to(dtype);
  const auto hidden = at::cat({of_reset, of_keep, of_fresh * reset}, 1).to(dtype);
  return {input, hidden, (given * keep).to(dtype), has_bias ? input.sum(0) : Tensor(),
          has_bias ? hidden.sum(0) : Tensor()};
}

// ---- SyncBatchNorm: the channel is dimension 1

static std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims(input.dim() - 1);
  std::iota(dims.begin(), dims.end(), 1);
  dims[0] = 0;
  return dims;
}
static Tensor of_channels(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = values.numel();
  return wide(values).view(shape);
}
static Tensor weighted(const Tensor& values, const Optional& weight, const Tensor& input) {
  return is_given(weight) ? values * of_channels(*weight, input) : values;
}

static std::tuple<Tensor, Tensor> statistics(const Tensor& input, double eps) {
  const auto [variance, mean] = at::var_mean(wide(input), all_but_channels(input), false);
  return {mean, (variance + eps).rsqrt()};
}

static std::tuple<Tensor, Tensor> gathered_statistics(
    const Tensor&, const Tensor& means, const Tensor& inverses, const Optional& running_mean,
    const Optional& running_variance, double momentum, double eps, const Tensor& counts) {
  const auto samples = counts.to(means.scalar_type()).view({-1, 1}), all = samples.sum();
  const auto mean = (means * samples).sum(0) / all;
  const auto variances = inverses.pow(-2) - eps + (means - mean).pow(2);
  const auto variance = (variances * samples).sum(0) / all;
  if (is_given(running_mean)) running_mean->mul_(1 - momentum).add_(mean * momentum);
  if (is_given(running_variance))
    running_variance->mul_(1 - momentum).add_(variance * (all / (all - 1)) * momentum);
  return {mean, (variance + eps).rsqrt()};
}

static Tensor normalized(const Tensor& input, const Optional& weight, const Optional& bias,
                         const Tensor& mean, const Tensor& inverse, double) {
  auto result = (wide(input) - of_channels(mean, input)) * of_channels(inverse, input);
  result = weighted(result, weight, input);
  if (is_given(bias)) result = result + of_channels(*bias, input);
  return result.to(input.scalar_type());
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> reduced_gradients(
    const Tensor& gradient, const Tensor& input, const Tensor& mean, const Tensor& inverse,
    const Optional& weight, bool, bool wants_weight, bool wants_bias) {
  const auto dims = all_but_channels(input);
  const auto given = wide(gradient), sum = given.sum(dims);
  const auto moment = (given * (wide(input) - of_channels(mean, input))).sum(dims);
  const auto dtype = is_given(weight) ? weight->scalar_type() : sum.scalar_type();
  return {sum, moment, wants_weight ? (moment * inverse).to(dtype) : Tensor(),
          wants_bias ? sum.to(dtype) : Tensor()};
}

static Tensor gradient_of_input(const Tensor& gradient, const Tensor& input, const Tensor& mean,
                                const Tensor& inverse, const Optional& weight, const Tensor& sum,
                                const Tensor& moment, const Tensor& counts) {
  const auto all = counts.sum();
  const auto scale = of_channels(inverse, input);
  const auto centered = wide(input) - of_channels(mean, input);
  const auto result = wide(gradient) - of_channels(sum / all, input) -
      centered * scale * scale * of_channels(moment / all, input);
  return weighted(result * scale, weight, input).to(input.scalar_type());
}

// ---- RMSNorm

static std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& gradient, const Tensor& input,
                                                    at::IntArrayRef shape, const Tensor& inverse,
                                                    const Optional& weight,
                                                    std::array<bool, 2> wanted) {
  std::vector<int64_t> inner, outer;
  const auto first = input.dim() - static_cast<int64_t>(shape.size());
  for (int64_t dim = 0; dim < input.dim(); ++dim) (dim < first ? outer : inner).push_back(dim);
  const auto given = wide(gradient), scale = wide(inverse), unit = wide(input) * scale;
  const auto through = is_given(weight) ? given * wide(*weight) : given;
  Tensor of_input, of_weight;
  if (wanted[0])
    of_input = (scale * (through - unit * (through * unit).mean(inner, true)))
                   .to(input.scalar_type());
  if (wanted[1] && is_given(weight)) {
    const auto product = given * unit;
    of_weight = (outer.empty() ? product : product.sum(outer)).to(weight->scalar_type());
  }
  return {of_input, of_weight};
}

// ---- whether a loss is cuDNN's to compute: without cuDNN it never is

static bool is_cudnns(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) {
  return false;
}
static bool is_cudnns_of_tensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                 int64_t) {
  return false;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const std::string name : {"_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"}) {
    library.impl(name.c_str(), &is_cudnns);
    library.impl((name + ".Tensor").c_str(), &is_cudnns_of_tensors);
  }
}
TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  library.impl("batch_norm_stats", &statistics);
  library.impl("batch_norm_gather_stats_with_counts", &gathered_statistics);
  library.impl("batch_norm_elemt", &normalized);
  library.impl("batch_norm_backward_reduce", &reduced_gradients);
  library.impl("batch_norm_backward_elemt", &gradient_of_input);
  library.impl("_fused_rms_norm_backward", &rms_norm_backward);
}

}  // namespace emulated
