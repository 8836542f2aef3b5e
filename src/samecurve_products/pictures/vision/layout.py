"""The layout of a vision model, the same under every engine: its grid of patches, the first values
of its parameters, and the share of samples that skip a block.

Names and shapes of parameters are those of torch_model.py and flax_model.py, which are equal.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from samecurve.seam import Initial, UserError
from samecurve_products.pictures.vision.sections import RECURRENT, NormOver, VisionModel

# of [..., down, across, width], what a normalisation of the model takes a mean over
NORM_AXES: Mapping[NormOver, tuple[int, ...]] = {"patch": (-1,), "image": (-3, -2, -1)}
RHO = 0.999  # the largest magnitude of a kernel in a recurrence
# the gates of hgru_bi, in the order in which they lie in the outputs of a layer
DECAYS = ("d_x", "d_y", "d_z")
COUPLINGS = ("mu_i", "alpha_i", "mu_e", "alpha_e", "gamma", "delta")
INPUTS = ("b", "d", "e")
LEAST_DECAY, DECAY_RANGE = 0.1, 0.89  # d = 0.1 + 0.89 sigmoid(...)

_HEAD = 0.02  # deviation of the first weights of the head and of the positions
_GATES = 0.02  # of the weights of the gates, which begin as their biases say
_BIASES = {  # of the gates: what they begin with, before softplus or sigmoid
    "gain.bias": 1.0,
    "readout.bias": 1.0,
    "couplings.bias": -2.0,
    "inputs.bias": 2.0,
    "outputs.bias": 2.0,
}
_OPEN = 1.5  # of the second half of input.bias in blocks with SiLU(z): their gates begin open
_WITH_OPEN_GATE = ("gated", "no_fft")


@dataclass(frozen=True)
class Grid:
    """The patches of an image."""

    height: int
    width: int

    @property
    def patches(self) -> int:
        return self.height * self.width

    @property
    def frequencies(self) -> int:
        """The numbers of a channel after rfft2."""
        return self.height * (self.width // 2 + 1)


def grid_of(fields: VisionModel, shape: tuple[int, int, int]) -> Grid:
    """The patches of images of a shape. UserError: patches or kernels do not fit the images."""
    height, width, _ = shape
    if height % fields.patch or width % fields.patch:
        fitting = [side for side in range(1, fields.patch) if not height % side | width % side]
        raise UserError(
            f"images have {height} x {width} pixels: no whole number of patches of {fields.patch}",
            f"--set model.patch={fitting[-1]}, or another number that divides both sides",
            "model.patch",
        )
    grid = Grid(height // fields.patch, width // fields.patch)
    least = min(grid.height, grid.width)
    has_kernel = fields.cssm in RECURRENT and fields.num_steps > 1
    if has_kernel and fields.kernel_size > least:
        steps = f"--set model.steps={fields.steps} " if fields.steps else ""  # of clips, too
        raise UserError(
            f"a kernel of {fields.kernel_size} x {fields.kernel_size} does not fit on"
            f" {grid.height} x {grid.width} patches",
            f"{steps}--set model.kernel_size={least}; or smaller patches",
            "model.kernel_size",
        )
    return grid


def for_clips(fields: VisionModel, frames: int) -> VisionModel:
    """The model's fields for clips, whose frames are the steps that the model sees.

    UserError: the fields are for single images only.
    """
    if fields.backbone is not None:
        raise UserError(
            f"model.backbone {fields.backbone} takes single images, and the samples are clips of"
            f" {frames} frames",
            "leave model.backbone out: --cssm gated (or another of model.cssm) reads clips; or"
            " single images",
            "model.backbone",
        )
    if fields.steps not in {None, frames}:
        raise UserError(
            f"model.steps {fields.steps}: the steps of a clip are its frames, {frames} here",
            f"leave model.steps out, or --set model.steps={frames}",
            "model.steps",
        )
    return fields.model_copy(update={"steps": frames})


def first_values(name: str, shape: tuple[int, ...], fields: VisionModel) -> Initial:
    """First values of a parameter: weights keep the variance of what goes through them.

    What is added to the residual stream begins smaller, by the root of the number of additions; but
    not what a gated block adds, whose products of small numbers are small already. A kernel begins
    with frequencies of a magnitude around 1, which rho K / (1 + |K|) makes 1/2.
    """
    leaf = name.rpartition(".")[2]
    if leaf == "bias":
        ending = ".".join(name.split(".")[-2:])
        if ending == "input.bias" and fields.cssm in _WITH_OPEN_GATE:
            return Initial(0.0, (0.0, _OPEN))
        return Initial(0.0, _BIASES.get(ending, 0.0))
    if "norm" in name:
        return Initial(0.0, 1.0)
    if leaf.startswith("kernel"):
        return Initial(1 / fields.kernel_size)
    if leaf == "filter":  # [channels, 3, 3] or [out, in, 3, 3]
        return Initial(1 / math.sqrt(math.prod(shape[1:])))
    if name.startswith(("head.", "position.", "frame_position.")):
        return Initial(_HEAD)
    if f"{name.split('.')[-2]}.bias" in _BIASES or name.endswith(("decays.weight", "delta.weight")):
        return Initial(_GATES)
    std = shape[-1] ** -0.5
    is_small = name.endswith("out.weight") and fields.cssm in _WITH_OPEN_GATE
    if name.endswith(("out.weight", "down.weight")) and not is_small:
        std /= (2 * fields.depth) ** 0.5
    return Initial(std)


def skip_rates(fields: VisionModel) -> list[float]:
    """The share of samples that skip each block: from 0 at the first to model.drop_path."""
    last = max(1, fields.depth - 1)
    return [fields.drop_path * block / last for block in range(fields.depth)]
