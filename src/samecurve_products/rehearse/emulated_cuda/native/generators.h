// CUDA's random generators: a seed and an offset, 16 bytes of state.
#pragma once
#include <ATen/core/Generator.h>

namespace emulated {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// A CPU generator for one kernel, seeded by the state, which moves on: the same state gives the
// same numbers again. They are not the numbers of a GPU.
at::Generator numbers_of(const at::Generator& generator);

}  // namespace emulated
