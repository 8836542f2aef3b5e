"""A model's weights by name, outside of training: a description of them, and loading them."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from samecurve.core.protocols import StoredArrays
from samecurve.core.weights import check_weights
from samecurve.torch_engine.optimizers import local_view


def describe_arrays(model: nn.Module) -> dict[str, Any]:
    """The facts arrays, buffers and aliases of a model, which may be on the meta device."""
    saved = model.state_dict().keys()
    parameters = dict(model.named_parameters())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    first_name = {id(parameter): name for name, parameter in parameters.items()}
    aliases = {
        name: first_name[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first_name[id(parameter)] != name
    }
    shapes = {
        name: (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
        for name, tensor in {**parameters, **buffers}.items()
    }
    return {"arrays": shapes, "buffers": tuple(buffers), "aliases": aliases}


@torch.no_grad()
def load_weights(
    model: nn.Module, weights: StoredArrays, *, optional: Collection[str] = ()
) -> nn.Module:
    """The model with these weights, ready to be used.

    weights: by a checkpoint's names, complex values as pairs
    optional: names of arrays that may stay as they are

    UserError: the weights are not this model's.
    """
    wanted = describe_arrays(model)["arrays"]
    shapes = {name: weights.shape(name) for name in weights}
    check_weights(shapes, wanted, optional, "the checkpoint", "task")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in wanted:
        if name in weights:  # an empty array is in no file
            local_view(tensors[name]).copy_(torch.from_numpy(weights[name]))
    return model.eval()
