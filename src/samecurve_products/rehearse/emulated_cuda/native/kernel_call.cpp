#include "kernel_call.h"

#include "arena.h"
#include "memory.h"
#include "settings.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace emulated {

using at::Tensor;

Block* block_of(const Tensor& tensor) {
  return tensor.has_storage() ? block_of(tensor.storage().data_ptr()) : nullptr;
}

KernelCall::KernelCall(int device, const std::string* name)
    : device_(device), launch_(launch(device, name)) {}

at::Storage KernelCall::alias_of(const at::Storage& storage) {
  auto& alias = alias_of_[storage.unsafeGetStorageImpl()];
  if (!alias) {
    at::DataPtr bytes(kernel_view(storage.data_ptr().get()), c10::Device(c10::DeviceType::CPU));
    alias = at::Storage(at::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes),
                        c10::GetCPUAllocator(), true);
    original_of_.emplace(alias.unsafeGetStorageImpl(), storage);
  }
  return alias;
}

Tensor KernelCall::on_storage(const Tensor& like, at::Storage storage, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  const bool is_input = key == c10::DispatchKey::CPU;
  if (is_input && like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return tensor;
}

Tensor KernelCall::alias(const Tensor& tensor) {
  auto made = on_storage(tensor, alias_of(tensor.storage()), c10::DispatchKey::CPU);
  tensor_of_.emplace(made.unsafeGetTensorImpl(), tensor);
  kept_.push_back(made);
  return made;
}

// A storage that was given back: a kernel of a GPU would use memory of somebody else.
static void check_memory_is_there(const Launch& launch, const Tensor& tensor) {
  const auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                       tensor.element_size(),
                                                       tensor.storage_offset());
  const auto bytes = tensor.storage().nbytes();
  if (needed <= bytes) return;
  add_finding("use_after_free", *launch.name + " uses a tensor whose memory was given back: " +
                  std::to_string(needed) + " bytes of a storage of " + std::to_string(bytes) +
                  " (storage.resize_, or a view of a weight that fsdp has freed)",
              launch.place);
  TORCH_CHECK(false, "CUDA error: an illegal memory access was encountered\nCUDA kernel errors "
              "might be asynchronously reported at some other API call, so the stacktrace below "
              "might be incorrect.");
}

Tensor KernelCall::argument(const Tensor& tensor, bool writes) {
  if (tensor.numel()) check_memory_is_there(*launch_, tensor);
  auto* block = tensor.numel() ? block_of(tensor) : nullptr;
  const bool read_too_early = block && touch(launch_, *block, writes);
  if (read_too_early) {
    const auto bytes = tensor.storage().nbytes();
    at::Storage poisoned(at::Storage::use_byte_size_t(), bytes,
                         c10::GetCPUAllocator()->allocate(bytes), c10::GetCPUAllocator(), true);
    std::memset(poisoned.mutable_data(), kPoison, bytes);
    return on_storage(tensor, std::move(poisoned), c10::DispatchKey::CPU);
  }
  auto made = alias(tensor);
  if (writes) written_.emplace_back(made, tensor);
  return made;
}

bool KernelCall::is_argument(const Tensor& tensor) const {
  return tensor_of_.count(tensor.unsafeGetTensorImpl()) > 0;
}

Tensor KernelCall::result(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
  const auto argument = tensor_of_.find(tensor.unsafeGetTensorImpl());
  if (argument != tensor_of_.end()) return argument->second;
  auto* made_by_kernel = tensor.storage().unsafeGetStorageImpl();
  auto& storage = original_of_[made_by_kernel];
  if (!storage) {  // the kernel's own memory: its bytes move to the device
    const auto bytes = made_by_kernel->nbytes();
    auto data = allocate(bytes, device_, Fill::nothing);
    if (bytes) std::memcpy(kernel_view(data.get()), made_by_kernel->data(), bytes);
    auto* block = block_of(data);
    if (bytes) touch(launch_, *block, true);
    storage = at::Storage(at::Storage::use_byte_size_t(), bytes, std::move(data),
                          device_allocator(), true);
    kept_.push_back(tensor);  // so that no other storage gets the same address in this call
  }
  return on_storage(tensor, storage, c10::DispatchKey::CUDA);
}

void KernelCall::put_back() {
  for (auto& [original, alias] : alias_of_) {
    const bool moved = alias.data_ptr().get() != kernel_view(original->data_ptr().get());
    if (moved) {
      auto data = allocate(alias.nbytes(), original->device().index(), Fill::nothing);
      if (alias.nbytes()) {
        std::memcpy(kernel_view(data.get()), alias.data_ptr().get(), alias.nbytes());
        touch(launch_, *block_of(data), true);
      }
      original->set_data_ptr_noswap(std::move(data));
    }
    if (alias.nbytes() != original->nbytes()) original->set_nbytes(alias.nbytes());
  }
  for (auto& [alias, original] : written_) {
    if (alias.sizes() == original.sizes() && alias.strides() == original.strides() &&
        alias.storage_offset() == original.storage_offset())
      continue;
    original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                          alias.storage_offset());
  }
}

void touch_tensor(const Tensor& tensor, bool writes, const std::string& name) {
  auto* block = tensor.numel() ? block_of(tensor) : nullptr;
  if (!block) return;
  const auto noted = launch(tensor.device().index(), kept_name(name));
  if (touch(noted, *block, writes)) poison(block->address, block->requested);
}

Tensor host_view(const Tensor& tensor) {
  const auto storage = tensor.storage();
  auto* keeper = new at::Storage(storage);
  at::DataPtr bytes(kernel_view(storage.data_ptr().get()), keeper,
                    [](void* kept) { delete static_cast<at::Storage*>(kept); },
                    c10::Device(c10::DeviceType::CPU));
  at::Storage view(at::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), nullptr,
                   false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(view), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  return made;
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const auto before = storage->nbytes();
  if (before == bytes) return;
  const auto kept = std::min(before, bytes);
  auto fresh = allocate(bytes, storage->device().index(), Fill::poison);
  if (kept) {
    static const auto* name = kept_name("resize_");
    const auto noted = launch(storage->device().index(), name);
    if (auto* old = block_of(storage->data_ptr())) touch(noted, *old, false);
    touch(noted, *block_of(fresh), true);
    std::memcpy(kernel_view(fresh.get()), kernel_view(storage->data_ptr().get()), kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

}  // namespace emulated
