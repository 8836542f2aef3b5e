// Every operator that CUDA has and this build has not: the CPU's kernel on the same bytes.
#include "counts.h"
#include "copies.h"
#include "deterministic.h"
#include "dtypes.h"
#include "generators.h"
#include "kernel_call.h"
#include "memory.h"
#include "settings.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_set>

namespace emulated {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

static bool is_one_of(const std::string& name, const std::unordered_set<std::string>& names) {
  return names.count(name) > 0;
}

// CUDA's kernels of these copy a size or a value to the host and wait for it.
static const std::unordered_set<std::string> kWaits = {
    "aten::_local_scalar_dense", "aten::nonzero",     "aten::masked_select",
    "aten::unique_dim",          "aten::_unique2",    "aten::unique_consecutive",
    "aten::is_nonzero",          "aten::equal",       "aten::bincount",
    "aten::unique_dim_consecutive"};
// These take CPU tensors of any size beside CUDA's.
static const std::unordered_set<std::string> kTakesHostTensors = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_pack_padded_sequence", "aten::_ctc_loss", "aten::_ctc_loss_backward"};

static bool has_mask_index(const std::string& name, c10::ArrayRef<IValue> arguments) {
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_")
    return false;
  if (name != "aten::index" && arguments[2].toTensor().numel() == 1 && !arguments[3].toBool())
    return false;  // becomes masked_fill
  for (const auto& index : arguments[1].toListRef())
    if (index.isTensor() && index.toTensor().scalar_type() == at::kBool) return true;
  return false;
}

static bool is_fused_update(const std::string& name) {
  return name.rfind("aten::_fused_ad", 0) == 0 || name.rfind("aten::_fused_sgd", 0) == 0;
}

// The arrays of a fused optimizer. CUDA's kernels compute each number alike, the CPU's the last few
// of an array in another way: arrays that are cut elsewhere would get other bits. So the CPU's
// kernel gets copies of such arrays, which whole vectors fill.
class WholeVectors {
 public:
  WholeVectors(const c10::FunctionSchema& schema, Stack& stack) {
    if (!is_fused_update(schema.name())) return;
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

  void finish() {
    for (const auto& [copied, numbers] : written_) numbers.copy_(copied);
  }

 private:
  Tensor filled_up(const Tensor& array, bool is_written) {
    constexpr int64_t vector_bytes = 64;  // of the widest vector instructions
    const auto size = array.numel(), in_vector = vector_bytes / array.element_size();
    const bool is_whole = size % in_vector == 0 || !array.dim();
    if (is_whole || !array.is_non_overlapping_and_dense()) return array;
    const auto numbers = array.as_strided({size}, {1});  // as they lie in memory
    const auto whole = at::zeros({(size / in_vector + 1) * in_vector}, array.options());
    const auto copied = whole.narrow(0, 0, size);
    copied.copy_(numbers);
    if (is_written) written_.emplace_back(copied, numbers);
    return whole;
  }

  std::vector<std::pair<Tensor, Tensor>> written_;  // numbers of the copy, of the array
};

class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), first_(stack->size() - arguments()) {
    find_device();
    const auto returned = schema_.returns().empty() ? nullptr : schema_.returns()[0].alias_info();
    is_view_ = returned && !returned->isWrite();
    makes_results_ = !schema_.returns().empty() && !returned;
  }

  void run() {
    check_deterministic(op_, *stack_);
    count_operation();
    const bool waits = is_one_of(schema_.name(), kWaits) ||
        has_mask_index(schema_.name(), torch::jit::last(*stack_, arguments()));
    if (waits) wait_on_host(current_stream(device_));
    KernelCall call(device_, &schema_.name());
    for (size_t i = 0; i < arguments(); ++i) convert(call, i);
    {
      Adaptation adaptation(schema_, *stack_);
      {
        at::DisableRecordFunctionGuard once;  // the profiler has counted the call already
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        WholeVectors vectors(schema_, *stack_);
        op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
        vectors.finish();
      }
      adaptation.finish(*stack_);
    }
    call.put_back();
    const size_t results = schema_.returns().size();
    for (size_t i = stack_->size() - results; i < stack_->size(); ++i) return_result(call, i);
    count();
    if (!waits) return;
    wait_on_host(call.noted()->stream);
    note_host_sync(schema_.name().c_str(), true);
  }

 private:
  size_t arguments() const { return schema_.arguments().size(); }
  IValue& at(size_t i) { return (*stack_)[first_ + i]; }

  void find_device() {
    for (size_t i = 0; i < arguments() && device_ < 0; ++i) {
      const auto& value = at(i);
      if (value.isTensor()) see(value.toTensor());
      else if (value.isList())
        for (const auto& element : value.toListRef())
          if (element.isTensor()) see(element.toTensor());
      if (value.isDevice() && value.toDevice().type() == kCuda)
        device_ = with_index(value.toDevice()).index();
    }
    if (device_ < 0) device_ = current_device();
  }
  void see(const Tensor& tensor) {
    if (device_ < 0 && tensor.defined() && tensor.is_cuda()) device_ = tensor.device().index();
  }

  [[noreturn]] void refuse(const Tensor& tensor, const c10::Argument& argument) {
    const c10::Device common(kCuda, static_cast<c10::DeviceIndex>(device_));
    add_finding("device", schema_.name() + " got " + argument.name() + " on " +
                    tensor.device().str() + " beside tensors on " + common.str(), here());
    if (op_.hasTag(at::Tag::pointwise))
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two "
                  "devices, ", common, " and ", tensor.device(), "!");
    const auto method = "wrapper_CUDA_" + schema_.name().substr(6);
    c10::impl::common_device_check_failure(common, tensor, method.c_str(),
                                           argument.name().c_str());
  }

  Tensor convert(KernelCall& call, const Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined()) return tensor;
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    if (!tensor.is_cuda()) {
      // a fused optimizer's kernel reads its counts and factors on the device
      const bool is_read_there = is_fused_update(schema_.name()) && argument.name() != "lr";
      const bool is_scalar = tensor.is_cpu() && tensor.dim() == 0 && !writes && !is_read_there;
      const bool is_taken = tensor.is_cpu() && is_one_of(schema_.name(), kTakesHostTensors);
      if (!is_scalar && !is_taken) refuse(tensor, argument);
      return tensor;
    }
    if (tensor.device().index() != device_) refuse(tensor, argument);
    if (is_view_) return call.alias(tensor);
    const auto bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    moved_ += writes && schema_.name().back() == '_' ? 2 * bytes : bytes;
    return call.argument(tensor, writes);
  }

  void convert(KernelCall& call, size_t i) {
    auto& value = at(i);
    const auto& argument = schema_.arguments()[i];
    if (value.isTensor()) {
      value = convert(call, value.toTensor(), argument);
    } else if (value.isTensorList()) {
      value = convert_list(call, value.toTensorVector(), argument);
    } else if (value.isList() &&
               value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<Tensor>> converted;
      for (const auto& element : value.toListRef())
        converted.push_back(element.isTensor()
                                ? std::optional(convert(call, element.toTensor(), argument))
                                : std::nullopt);
      value = converted;
    } else if (value.isDevice() && value.toDevice().type() == kCuda) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isGenerator() && value.toGenerator().device().type() == kCuda) {
      value = numbers_of(value.toGenerator());
    } else if (value.isNone() && is_optional_generator(argument)) {
      value = numbers_of(default_generator(device_));
    } else if (value.isBool() && argument.name() == "pin_memory") {
      value = false;
    }
  }

  static bool is_optional_generator(const c10::Argument& argument) {
    if (argument.type()->kind() != c10::TypeKind::OptionalType) return false;
    const auto inner = argument.type()->expectRef<c10::OptionalType>().getElementType();
    return inner->kind() == c10::TypeKind::GeneratorType;
  }

  IValue convert_list(KernelCall& call, const std::vector<Tensor>& tensors,
                      const c10::Argument& argument) {
    if (!tensors.empty()) ++lists_;
    if (tensors.size() >= longest_list_) {
      longest_list_ = tensors.size();
      chunks_ = 0;
      for (const auto& tensor : tensors)
        if (tensor.defined()) chunks_ += (tensor.numel() + kChunk - 1) / kChunk;
    }
    c10::List<Tensor> converted;
    converted.reserve(tensors.size());
    for (const auto& tensor : tensors) converted.push_back(convert(call, tensor, argument));
    return converted;
  }

  Tensor returned(KernelCall& call, const Tensor& tensor) {
    auto result = call.result(tensor);
    if (makes_results_ && result.defined() && result.is_cuda() && !call.is_argument(tensor))
      moved_ += result.numel() * static_cast<int64_t>(result.element_size());
    return result;
  }
  void return_result(KernelCall& call, size_t i) {
    auto& value = (*stack_)[i];
    if (value.isTensor()) {
      value = returned(call, value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> results;
      for (const auto& tensor : value.toTensorVector()) results.push_back(returned(call, tensor));
      value = results;
    }
  }

  // CUDA launches a list's operator in one kernel for as many tensors and chunks as its
  // arguments hold (ATen/native/cuda/MultiTensorApply.cuh).
  int64_t launches() const {
    const auto& name = schema_.name();
    if (is_view_ || name == "aten::_local_scalar_dense") return 0;
    const bool is_fused = is_fused_update(name);
    const bool is_multi_tensor = is_fused || name.rfind("aten::_foreach_", 0) == 0 ||
        name.rfind("aten::_amp_foreach", 0) == 0;
    if (!is_multi_tensor || !longest_list_) return 1;
    static const int64_t tensors_in_one[] = {110, 110, 64, 48, 36, 30};
    constexpr int64_t chunks_in_one = 320;
    const bool is_norm = name == "aten::_foreach_norm";
    const size_t depth = is_fused ? 4 : is_norm ? 1 : lists_ + (name.back() == '_' ? 0 : 1);
    const auto at_once = tensors_in_one[std::min<size_t>(depth, 5)];
    const auto for_tensors = (static_cast<int64_t>(longest_list_) + at_once - 1) / at_once;
    const auto kernels = std::max(for_tensors, (chunks_ + chunks_in_one - 1) / chunks_in_one);
    return is_norm ? 2 * kernels : kernels;
  }

  void count() {
    if (!is_counting()) return;
    if (schema_.name() == "aten::_local_scalar_dense") count_copy("copy D2H", moved_);
    count_call(schema_.name() + "." + schema_.overload_name(), launches(), moved_);
  }

  static constexpr int64_t kChunk = 65536;
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t first_;
  int device_ = -1;
  bool is_view_ = false, makes_results_ = false;
  int64_t moved_ = 0, chunks_ = 0;
  size_t lists_ = 0, longest_list_ = 0;
};

static void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  OperatorCall(op, stack).run();
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// Operators with a kernel for all devices, which would win over the fallback and split up what
// CUDA runs as one.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const auto* name :
       {"convolution", "convolution_backward", "_convolution", "native_batch_norm",
        "native_batch_norm_backward", "native_layer_norm", "native_group_norm", "_fused_rms_norm",
        "silu_backward", "mish_backward", "addr", "addr.out", "all.dims", "all.dims_out",
        "any.dims", "any.dims_out", "linalg__powsum", "_chunk_cat", "_chunk_cat.out",
        "split_with_sizes_copy.out", "_grouped_mm", "_weight_int8pack_mm"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool is_list_operator = op.name.rfind("aten::_foreach_", 0) == 0 ||
        op.name.rfind("aten::_amp_foreach", 0) == 0;
    if (!is_list_operator || op.overload_name.find("out") != std::string::npos) continue;
    const auto name = op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

}  // namespace emulated
