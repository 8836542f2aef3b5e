// One kernel: CUDA tensors go in as CPU tensors of the same bytes, and CPU results come out as
// CUDA tensors.
#pragma once
#include "order.h"

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace emulated {

class KernelCall {
 public:
  KernelCall(int device, const std::string* name);

  // A CPU tensor on the bytes of a CUDA tensor, its access noted. A read that came too early
  // gets poison instead.
  at::Tensor argument(const at::Tensor& tensor, bool writes);
  at::Tensor alias(const at::Tensor& tensor);  // the same without a note
  at::Tensor result(const at::Tensor& tensor);
  bool is_argument(const at::Tensor& tensor) const;
  void put_back();  // what the kernel resized or restrided is so in the CUDA tensors, too
  const LaunchPointer& noted() const { return launch_; }

 private:
  at::Storage alias_of(const at::Storage& storage);
  at::Tensor on_storage(const at::Tensor& like, at::Storage storage, c10::DispatchKey key);

  int device_;
  LaunchPointer launch_;
  std::unordered_map<c10::StorageImpl*, at::Storage> alias_of_;     // by the CUDA storage
  std::unordered_map<c10::StorageImpl*, at::Storage> original_of_;  // by the alias
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensor_of_;      // by the alias
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;          // alias, CUDA tensor
  std::vector<at::Tensor> kept_;
};

// Notes one access outside of a kernel call, such as a collective's.
void touch_tensor(const at::Tensor& tensor, bool writes, const std::string& name);
// A CPU tensor on the same bytes, which it keeps alive.
at::Tensor host_view(const at::Tensor& tensor);
void resize_storage(c10::StorageImpl* storage, size_t bytes);
Block* block_of(const at::Tensor& tensor);

}  // namespace emulated
