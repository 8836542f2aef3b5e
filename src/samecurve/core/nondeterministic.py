"""Operations of torch that have no deterministic kernel on GPUs: no run has the same bits there
that calls one.

torch raises an error when one of them runs under torch.use_deterministic_algorithms(True), in the
forward pass or in the backward pass. CPUs have deterministic kernels for nearly all of them.

Source: the calls of at::Context::alertNotDeterministic in the libraries of the CUDA builds of torch
2.8.0 and 2.13.0 (libtorch_cuda.so, libtorch_cpu.so), read from their machine code. The docstring of
torch.use_deterministic_algorithms lists more: cumsum and ReflectionPad2d raise in neither version.
Left out is what the code of torch.nn.functional replaces in that mode: ReplicationPad, bilinear
upsampling and, in 2.13, trilinear upsampling and MaxPool3d. kthvalue raises in 2.8 only. An
operation that is missing here is refused in the run's first step (explained()).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from samecurve.errors import SAME_BITS, WITHOUT_SAME_BITS, NotSameBitsError
from samecurve.units import some

_MOST_NAMES = 3  # operations that a refusal names
_ALERT = " does not have a deterministic implementation"  # in torch's words
_ENDING = re.compile(r"_(?:out|cuda|gpu|out_cuda|out_cuda_template)$")  # of that name
_NAME = re.compile(r"(?:^|: )((?:[^:\n]|::)+)$")  # what torch calls the operation, before them


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation without a deterministic kernel on GPUs.

    called: the operator of torch.ops.aten that a forward pass calls, perhaps with its overload; an
        operator in place is meant too
    raises: the operator that raises the error, of the forward pass or of the backward pass
    alert: how the error of torch 2.13 names it; other versions have other endings
    words: how its users know it
    instead: what can stand in its place; '': nothing is known
    only: an argument, and the values of it that raise the error: the text of a number or of a
        string; "floats", "integers" or "none" for a tensor. Empty: all calls do
    """

    called: str
    raises: str
    alert: str
    words: str
    instead: str = ""
    only: tuple[str, tuple[str, ...]] | tuple[()] = ()

    @property
    def in_backward(self) -> bool:
        """Whether the backward pass raises the error, so that a call without gradients may run."""
        return self.raises.removesuffix("_") != self.called.partition(".")[0]


_FIXED_WINDOW = "{} with a window and a stride, or {}(1)"
_INDEX = "x[..., places], where the buffer places holds the reflected positions"

OPERATIONS: Sequence[Operation] = (
    Operation(
        called="_adaptive_avg_pool2d",
        raises="_adaptive_avg_pool2d_backward",
        alert="adaptive_avg_pool2d_backward_cuda",
        words="AdaptiveAvgPool2d",
        instead=_FIXED_WINDOW.format("AvgPool2d", "AdaptiveAvgPool2d"),
    ),
    Operation(
        called="_adaptive_avg_pool3d",
        raises="_adaptive_avg_pool3d_backward",
        alert="adaptive_avg_pool3d_backward_cuda",
        words="AdaptiveAvgPool3d",
        instead="AdaptiveAvgPool3d(1)",
    ),
    Operation(
        called="adaptive_max_pool2d",
        raises="adaptive_max_pool2d_backward",
        alert="adaptive_max_pool2d_backward_cuda",
        words="AdaptiveMaxPool2d",
        instead="MaxPool2d with a window and a stride, or amax()",
    ),
    Operation(
        called="avg_pool3d",
        raises="avg_pool3d_backward",
        alert="avg_pool3d_backward_cuda",
        words="AvgPool3d",
        instead="reshape() and mean(), where windows do not overlap",
    ),
    Operation(
        called="fractional_max_pool2d",
        raises="fractional_max_pool2d_backward",
        alert="fractional_max_pool2d_backward_cuda",
        words="FractionalMaxPool2d",
        instead="MaxPool2d",
    ),
    Operation(
        called="fractional_max_pool3d",
        raises="fractional_max_pool3d_backward",
        alert="fractional_max_pool3d_backward_cuda",
        words="FractionalMaxPool3d",
    ),
    Operation(
        called="max_unpool2d",
        raises="max_unpool2d",
        alert="max_unpooling2d_forward_out",
        words="MaxUnpool2d",
        instead="interpolate(mode='nearest')",
    ),
    Operation(
        called="max_unpool3d",
        raises="max_unpool3d",
        alert="max_unpooling3d_forward_out",
        words="MaxUnpool3d",
        instead="interpolate(mode='nearest')",
    ),
    Operation(
        called="reflection_pad1d",
        raises="reflection_pad1d_backward",
        alert="reflection_pad1d_backward_out_cuda",
        words="ReflectionPad1d",
        instead=_INDEX,
    ),
    Operation(
        called="reflection_pad3d",
        raises="reflection_pad3d_backward",
        alert="reflection_pad3d_backward_out_cuda",
        words="ReflectionPad3d",
        instead=_INDEX,
    ),
    Operation(
        called="upsample_linear1d",
        raises="upsample_linear1d_backward",
        alert="upsample_linear1d_backward_out_cuda",
        words="interpolate(mode='linear')",
        instead="interpolate(mode='bilinear') of x[:, :, None]",
    ),
    Operation(
        called="upsample_bicubic2d",
        raises="upsample_bicubic2d_backward",
        alert="upsample_bicubic2d_backward_out_cuda",
        words="interpolate(mode='bicubic')",
        instead="interpolate(mode='bilinear')",
    ),
    Operation(
        called="_upsample_bilinear2d_aa",
        raises="_upsample_bilinear2d_aa_backward",
        alert="upsample_bilinear2d_aa_backward_out_cuda",
        words="interpolate(mode='bilinear', antialias=True)",
        instead="interpolate(mode='bilinear') without antialias",
    ),
    Operation(
        called="_upsample_bicubic2d_aa",
        raises="_upsample_bicubic2d_aa_backward",
        alert="upsample_bicubic2d_aa_backward_out_cuda",
        words="interpolate(mode='bicubic', antialias=True)",
        instead="interpolate(mode='bilinear') without antialias",
    ),
    Operation(
        called="grid_sampler_2d",
        raises="grid_sampler_2d_backward",
        alert="grid_sampler_2d_backward_cuda",
        words="grid_sample",
    ),
    Operation(
        called="grid_sampler_3d",
        raises="grid_sampler_3d_backward",
        alert="grid_sampler_3d_backward_cuda",
        words="grid_sample of volumes",
    ),
    Operation(
        called="nll_loss2d_forward",
        raises="nll_loss2d_forward",
        alert="nll_loss2d_forward_out_cuda_template",
        words="cross_entropy of images or sequences",  # logits [batch, classes, ...]
        instead='cross_entropy(..., reduction="none").sum()',
        only=("reduction", ("1", "2")),  # a mean, a sum
    ),
    Operation(
        called="_ctc_loss",
        raises="_ctc_loss_backward",
        alert="ctc_loss_backward_gpu",
        words="ctc_loss",
    ),
    Operation(
        called="_embedding_bag",
        raises="_embedding_bag_backward",
        alert="embedding_bag_backward_cuda_max",
        words="EmbeddingBag(mode='max')",
        instead="Embedding, then amax()",
        only=("mode", ("2",)),
    ),
    Operation(
        called="put",
        raises="put_",
        alert="put_",
        words="put_",
        instead="index_put",
    ),
    Operation(
        called="take",
        raises="put",  # of its backward pass
        alert="put_",
        words="take",
        instead="x.flatten()[index]",
    ),
    Operation(
        called="index_reduce",
        raises="index_reduce",
        alert="index_reduce_cuda",
        words="index_reduce",
        instead="scatter_reduce with sum, amax or amin",
    ),
    Operation(
        called="scatter_reduce.two",
        raises="scatter_reduce",
        alert="scatter_reduce_cuda_prod",
        words="scatter_reduce(reduce='prod')",
        only=("reduce", ("prod",)),
    ),
    Operation(
        called="scatter.reduce",
        raises="scatter",
        alert="scatter_reduce_cuda_kernel",
        words="scatter(reduce=...)",
        instead="scatter_add",
    ),
    Operation(
        called="median.dim",
        raises="median",
        alert="median CUDA with indices output",
        words="median(dim)",
        instead="sort(dim).values, and its middle",
    ),
    Operation(
        called="nanmedian.dim",
        raises="nanmedian",
        alert="median CUDA with indices output",
        words="nanmedian(dim)",
    ),
    Operation(
        called="bincount",
        raises="bincount",
        alert="_bincount_cuda",
        words="bincount(weights=...)",
        instead="scatter_add",
        only=("weights", ("floats", "integers")),
    ),
    Operation(
        called="histc",
        raises="histc",
        alert="_histc_cuda",
        words="histc",
        instead="bincount of bucketize()",
        only=("self", ("floats",)),
    ),
)


def refusal(names: Sequence[str], place: str = "GPUs", where: str = "") -> NotSameBitsError:
    """The refusal of a run that can't have the same bits because of these operations.

    names: each begins with an operation's words; where it is called may follow
    place: that has no kernel. where: in the user's code, where that is known
    """
    verb = "has" if len(names) == 1 else "have"
    why = f"{some(names, _MOST_NAMES)} {verb} no deterministic kernel on {place}"
    remedy = f"{WITHOUT_SAME_BITS} ({SAME_BITS}: false)"
    if place == "GPUs":
        remedy += ", or --devices cpu"
    instead = {
        row.words: row.instead
        for name in names[:_MOST_NAMES]
        for row in OPERATIONS
        if row.instead and name.startswith(row.words)
    }
    replacements = [f"in place of {words}: {other}" for words, other in instead.items()]
    return NotSameBitsError(why, "; ".join([remedy, *replacements]), where)


def operation_in(error: str) -> str:
    """The operation that an error of torch's names, in the words of its users; '': the error is
    another one.
    """
    before, alert, _ = error.partition(_ALERT)
    if not alert:
        return ""
    match = _NAME.search(before)
    name = match[1] if match else before
    return next((row.words for row in OPERATIONS if _ENDING.sub("", row.alert) in name), name)
