// Operators that torch calls on CUDA alone, so that the CPU has no kernel for them.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <tuple>

namespace emulated {

using at::Tensor;
using OptionalTensor = const std::optional<Tensor>&;

// The cells of nn.LSTM and nn.GRU, one kernel on CUDA, as the CPU computes them: from operators
// that have gradients of their own.
static Tensor with_bias(const Tensor& gates, OptionalTensor bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

static std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& cell,
    OptionalTensor input_bias, OptionalTensor hidden_bias) {
  const auto gates = with_bias(from_input, input_bias) + with_bias(from_hidden, hidden_bias);
  const auto parts = gates.chunk(4, 1);  // input, forget, candidate, output
  const auto next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates};
}

static std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& hidden,
    OptionalTensor input_bias, OptionalTensor hidden_bias) {
  const auto input = with_bias(from_input, input_bias).chunk(3, 1);  // reset, update, candidate
  const auto before = with_bias(from_hidden, hidden_bias).chunk(3, 1);
  const auto candidate = (input[2] + (input[0] + before[0]).sigmoid() * before[2]).tanh();
  const auto kept = (input[1] + before[1]).sigmoid() * (hidden - candidate);
  return {candidate + kept, candidate};
}

// No library of a GPU has a CTC loss here, so torch calls the operators of its own kernel.
static bool has_ctc(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) {
  return false;
}
static bool has_ctc_of_tensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                               int64_t) {
  return false;
}

static void add_cells(torch::Library& library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { add_cells(library); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  add_cells(library);
  library.impl("_use_cudnn_ctc_loss", &has_ctc);
  library.impl("_use_cudnn_ctc_loss.Tensor", &has_ctc_of_tensors);
  library.impl("_use_miopen_ctc_loss", &has_ctc);
  library.impl("_use_miopen_ctc_loss.Tensor", &has_ctc_of_tensors);
}

}  // namespace emulated
