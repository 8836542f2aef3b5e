// The Python lines of forward operations, kept for the kernels of their backward passes.
//
// autograd computes a device's gradients in a thread of its own, which has no Python lines. Each
// node of its graph has the number that the forward pass gave it, by which the lines are found.
#pragma once
#include "findings.h"

namespace emulated {

void note_forward(const Place& place);  // a kernel of a forward pass starts at these lines
Place forward_of_this_node();           // empty outside of a backward pass, or where forgotten

}  // namespace emulated
