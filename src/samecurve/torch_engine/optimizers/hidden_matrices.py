"""The choice of the parameters that are matrices of hidden layers, which muon is for."""

from torch import nn
from torch.nn.modules.conv import _ConvNd

from samecurve.torch_engine.model.model_setup import repeated_blocks


def hidden_matrices(model: nn.Module) -> tuple[str, ...]:
    """Names of matrices, and of stacks of them (a mixture's experts), within the repeated blocks;
    of a model without such blocks, of all its layers.

    None is a weight of an embedding or a kernel of a convolution, and neither are the model's first
    and last arrays, its input and output, unless they lie in a block of several layers.
    """
    blocks = repeated_blocks(model)
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    bare = {id(p) for block in blocks if not list(block.children()) for p in block.parameters()}
    others = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | _ConvNd)
        for p in module.parameters(recurse=False)
    }
    arrays = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    for _, p in arrays[:1] + arrays[-1:]:
        if id(p) not in in_blocks or id(p) in bare:
            others.add(id(p))
    matrices = [(name, p) for name, p in arrays if id(p) not in others and _is_matrix(p)]
    hidden = [name for name, p in matrices if id(p) in in_blocks]
    if not hidden:
        hidden = [name for name, p in matrices if p.ndim == 2]
    return tuple(hidden)


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Whether it is one, or a stack of several."""
    is_stack = parameter.ndim == 3 and min(parameter.shape) > 1
    return (parameter.ndim == 2 or is_stack) and not parameter.is_complex()
