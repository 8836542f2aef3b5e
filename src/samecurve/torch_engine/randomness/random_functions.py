"""Which of torch's random functions a microbatch serves, and by what: the numbers follow samples or
step.

Each of what serves takes the original, then the microbatch, then what the original takes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from samecurve.torch_engine.randomness.distributions import (
    bernoulli_values,
    exponential_values,
    fill_in_place,
    new_tensor,
    normal,
    normal_values,
    randint,
    torch_bernoulli,
    torch_normal,
    uniform,
    uniform_values,
)
from samecurve.torch_engine.randomness.dropout_functions import DropoutKind, dropout, rrelu
from samecurve.torch_engine.randomness.keyed_recurrent import recurrent
from samecurve.torch_engine.randomness.row_generators import multinomial, randperm, row_by_row

# Any: a function of torch is called as its user calls it, in each of its forms.
Serve = Callable[..., Any]  # (original, microbatch, *arguments, **options)


def torch_functions() -> dict[str, Serve]:
    """Of `torch`, by name."""
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
        **inner_functions(),
    }


def inner_functions() -> dict[str, Serve]:
    """Of `torch._VF`, through which torch.nn calls them, and of `torch`."""
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


def tensor_methods() -> dict[str, Serve]:
    """Of `torch.Tensor`."""
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
