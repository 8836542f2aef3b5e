#include "generators.h"

#include "settings.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <vector>

namespace emulated {

struct CudaGenerator final : c10::GeneratorImpl {
  explicit CudaGenerator(int device)
      : c10::GeneratorImpl(c10::Device(kCuda, static_cast<c10::DeviceIndex>(device)),
                           c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    offset_ = offset;
  }
  uint64_t get_offset() const override { return offset_; }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    const auto bytes = state.numel();
    TORCH_CHECK(bytes == 8 || bytes == 16, "RNG state is wrong size");
    const auto* from = static_cast<const char*>(state.data());
    std::memcpy(&seed_, from, 8);
    offset_ = 0;
    if (bytes == 16) std::memcpy(&offset_, from + 8, 8);
  }

  at::Generator numbers() {
    std::lock_guard<std::mutex> lock(mutex_);
    auto mixed = seed_ + 0x9E3779B97F4A7C15ULL * (offset_ + 1);  // splitmix64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
    offset_ += 4;
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
  }

 private:
  CudaGenerator* clone_impl() const override {
    auto* copy = new CudaGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

at::Generator new_generator(int device) {
  return at::make_generator<CudaGenerator>(device < 0 ? current_device() : device);
}

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < emulated_devices(); ++i) made->push_back(new_generator(i));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

at::Generator numbers_of(const at::Generator& generator) {
  return static_cast<CudaGenerator*>(generator.unsafeGetGeneratorImpl())->numbers();
}

}  // namespace emulated
