"""The arithmetic of one optimizer step: from the sums of microbatches to a scaled gradient.

1. Each microbatch gives a loss sum and a weight (__init__.py). Its backward pass starts from
   `loss sum * loss_factor`, so it gives the gradient of a sum, times a power of two.
2. Gradients, loss sums and weights are added over the microbatches and the devices (along the tree
   in microbatches.py where every bit counts). Nothing is divided before all of it is added.
3. One correction follows: it divides by the weight of the whole step and undoes the loss factor.
4. Clipping comes after the correction, on the norm of the whole gradient.
5. A step whose loss or gradient is not finite, or whose weight is 0, is not applied: neither the
   weights nor the optimizer state change.

None of this depends on the number of devices. Both engines call these functions, each with its own
kind of number: Python floats, tensors of one number on a GPU, arrays inside a compiled program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

# Any below is one number of the engine's kind: float, torch.Tensor or jax.Array.

GROW_AFTER = 2000  # finite steps before f16's loss scale is doubled, as in torch.amp.GradScaler


class Clip(NamedTuple):
    """How a gradient is clipped: multiplied by max_norm / (norm + epsilon), at most by 1.

    max_norm: the largest norm of the whole gradient; 0: no clipping.
    epsilon: 1e-6 in torch's clip_grad_norm_.
    """

    max_norm: float
    epsilon: float


class NumberFunctions(NamedTuple):
    """Functions that the arithmetic needs beside + * / and comparison, for one kind of number.

    divide: x / y, but infinite where y is 0: Python's own / raises an error.
    maximum: the larger of a number and a float; a nan stays a nan.
    is_finite: neither nan nor infinite.
    """

    divide: Callable[[Any, Any], Any]
    maximum: Callable[[Any, float], Any]
    is_finite: Callable[[Any], Any]


class GradientScaling(NamedTuple):
    """How a step's summed gradient is scaled before the update.

    factor: the summed gradient is multiplied by it: the correction and the clipping in one.
    grad_norm: norm of the mean loss's gradient, before clipping.
    finite: whether the update is made.
    loss_scale: the scale that the factor takes out again; 1 unless the precision is f16.
    """

    factor: Any
    grad_norm: Any
    finite: Any
    loss_scale: Any


def nominal_weight(global_batch_size: int, weight_per_sample: int) -> float:
    """The power of two at or above a full step's weight.

    Each microbatch's loss sum is divided by it before the backward pass. That keeps gradients
    within f16's range and, since it is a power of two, changes no digit.
    """
    return float(2 ** max(0, (global_batch_size * weight_per_sample - 1).bit_length()))


def loss_factor(loss_scale: Any, nominal_weight: float) -> Any:
    """The factor of a microbatch's loss sum, applied before its backward pass."""
    return loss_scale / nominal_weight


def scale_gradient(
    *,
    loss_sum: Any,
    weight: Any,
    summed_norm: Any,
    loss_scale: Any,
    nominal_weight: float,
    clip: Clip,
    numbers: NumberFunctions,
) -> GradientScaling:
    """Correct and clip the gradient of a step.

    loss_sum, weight: of the whole step, over all devices.
    summed_norm: norm of the summed gradient, which still has the loss factor in it.
    """
    correction = numbers.divide(nominal_weight, weight * loss_scale)
    grad_norm = summed_norm * correction
    factor = correction
    if clip.max_norm:
        bound = numbers.maximum(grad_norm + clip.epsilon, clip.max_norm)
        factor = correction * (clip.max_norm / bound)
    # the product is finite only if both are
    finite = numbers.is_finite(grad_norm * loss_sum) & (weight > 0)
    return GradientScaling(factor, grad_norm, finite, loss_scale)


def next_loss_scale(
    loss_scale: Any, streak: Any, finite: Any, where: Callable[[Any, Any, Any], Any]
) -> tuple[Any, Any]:
    """f16's loss scale after a step, and the number of finite steps since it last changed.

    The scale is halved after a gradient that is not finite, and doubled after GROW_AFTER finite
    ones in a row. All ranks compute the same scale, because they have the same numbers.
    where: (condition, value if true, value if false) -> value.
    """
    streak = where(finite, streak + 1, 0)
    grow = streak >= GROW_AFTER
    grown = where(grow, loss_scale * 2, loss_scale)
    return where(finite, grown, loss_scale * 0.5), where(grow, 0, streak)
