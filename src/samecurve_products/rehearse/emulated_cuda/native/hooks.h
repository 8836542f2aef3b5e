// Tells torch of the emulated devices: guard, allocators, hooks, timers.
#pragma once

namespace emulated {

void install();

}  // namespace emulated
