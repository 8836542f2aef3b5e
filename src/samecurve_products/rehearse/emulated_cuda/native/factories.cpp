// Operators that make tensors or change their storage.
#include "kernel_call.h"
#include "memory.h"
#include "settings.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarType.h>
#include <torch/library.h>

namespace emulated {

using at::Tensor;

static const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

static c10::OptionalDeviceGuard on(const std::optional<c10::Device>& device) {
  return c10::OptionalDeviceGuard(
      device ? std::optional<c10::Device>(with_index(*device)) : std::nullopt);
}

static Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout>, std::optional<c10::Device> device,
                    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const auto guard = on(device);
  return at::detail::empty_generic(size, device_allocator(), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                            std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const auto guard = on(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

static Tensor& set_view(Tensor& self, at::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

static Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous(c10::IntArrayRef{numel});
  return self;
}

static Tensor& set_empty(Tensor& self) {
  return set_storage(self, at::empty({0}, self.options()).storage());
}

static const Tensor& resize_(const Tensor& self, c10::IntArrayRef size,
                             std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {  // equal sizes keep their strides
    auto* impl = self.unsafeGetTensorImpl();
    const auto elements = c10::multiply_integers(size) + self.storage_offset();
    const auto bytes = static_cast<size_t>(elements) * self.element_size();
    if (bytes > self.storage().nbytes())
      resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
    impl->set_sizes_contiguous(size);
  }
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

static void record_stream(Tensor& self, c10::Stream stream) {
  if (auto* block = block_of(self)) record_use(*block, key_of(stream));
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("set_.source_Storage_storage_offset", &set_view);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_", &set_empty);
  library.impl("resize_", &resize_);
  library.impl("record_stream", &record_stream);
}

}  // namespace emulated
