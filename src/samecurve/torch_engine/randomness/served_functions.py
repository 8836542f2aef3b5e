"""Functions in place of torch's random functions, by the name that each replaces.

replaced_functions.py puts them into torch, and imports this page at a run's first draw.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF

from samecurve.torch_engine.randomness.dropout_functions import (
    DropoutKind,
    attention,
    dropout,
    recurrent,
    rrelu,
)
from samecurve.torch_engine.randomness.random_functions import (
    bernoulli_values,
    exponential_values,
    fill_in_place,
    multinomial,
    new_tensor,
    normal,
    normal_values,
    randint,
    randperm,
    row_by_row,
    torch_bernoulli,
    torch_normal,
    uniform,
    uniform_values,
)

Serve = Callable[..., Any]  # (original, microbatch, *arguments, **options)


@cache
def served_functions(owner: Any) -> Mapping[str, Serve]:
    """The functions in place of those of `torch`, `torch._VF`, `torch.Tensor`, or nn.functional."""
    if owner is torch:
        return _torch_functions()
    if owner is torch.Tensor:
        return _tensor_methods()
    if owner is _VF:
        return _inner_functions()
    assert owner is F
    return {"scaled_dot_product_attention": attention}


def _torch_functions() -> dict[str, Serve]:
    """Functions in place of those of `torch`, by name."""
    empty, empty_like = torch.empty, torch.empty_like
    return {
        "rand": partial(new_tensor, "torch.rand", uniform, empty),
        "randn": partial(new_tensor, "torch.randn", normal, empty),
        "rand_like": partial(new_tensor, "torch.rand_like", uniform, empty_like),
        "randn_like": partial(new_tensor, "torch.randn_like", normal, empty_like),
        "randint": partial(randint, "torch.randint", empty),
        "randint_like": partial(randint, "torch.randint_like", empty_like),
        "normal": torch_normal,
        "bernoulli": torch_bernoulli,
        "multinomial": multinomial,
        "randperm": randperm,
        "poisson": partial(row_by_row, "torch.poisson"),
        "binomial": partial(row_by_row, "torch.binomial"),
        "_standard_gamma": partial(row_by_row, "torch._standard_gamma"),
        "_sample_dirichlet": partial(row_by_row, "torch._sample_dirichlet"),
        **_inner_functions(),
    }


def _inner_functions() -> dict[str, Serve]:
    """Functions in place of those of `torch._VF`, through which torch.nn calls, and of `torch`."""
    kinds = (
        DropoutKind("dropout"),
        DropoutKind("feature_dropout", channels=True),
        DropoutKind("alpha_dropout", alpha=True),
        DropoutKind("feature_alpha_dropout", channels=True, alpha=True),
    )
    functions: dict[str, Serve] = {}
    for kind in kinds:
        functions[kind.name] = partial(dropout, kind)
        functions[f"{kind.name}_"] = partial(dropout, replace(kind, inplace=True))
    functions["rrelu"], functions["rrelu_"] = partial(rrelu, False), partial(rrelu, True)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        functions[name] = partial(recurrent, name)
    return functions


def _tensor_methods() -> dict[str, Serve]:
    """Functions in place of methods of `torch.Tensor`, by name."""
    in_place: dict[str, Callable[..., torch.Tensor]] = {
        "uniform_": uniform_values,
        "normal_": normal_values,
        "exponential_": exponential_values,
        "bernoulli_": bernoulli_values,
    }
    methods: dict[str, Serve] = {
        name: partial(fill_in_place, f"Tensor.{name}", values) for name, values in in_place.items()
    }
    for name in ("random_", "log_normal_", "cauchy_", "geometric_"):
        methods[name] = partial(row_by_row, f"Tensor.{name}")
    return {**methods, "bernoulli": torch_bernoulli, "multinomial": multinomial}
