"""The facts about a class's PyTorch model that plan() needs, and that only it needs.

The model is built without values and is not trained.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from samecurve.core.config.param_groups import names_by_phase
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import DescribedArrays, UserOptimizerFacts
from samecurve.errors import UserError
from samecurve.tasks.adapter import TaskAdapter
from samecurve.tasks.adapter.bits_trial import bits_hindrance
from samecurve.tasks.adapter.returned import parameters_of
from samecurve.tasks.adapter.sample_work import work_facts
from samecurve.tasks.adapter.two_samples import try_features, try_loss
from samecurve.torch_engine.model import TrainingMode, coupling_layers, kept_in_eval
from samecurve.torch_engine.model.frozen_blocks import frozen_blocks
from samecurve.torch_engine.model.model_builder import on_meta
from samecurve.torch_engine.model.model_setup import freeze, repeated_blocks, sharding_facts
from samecurve.torch_engine.model.model_weights import describe_arrays
from samecurve.torch_engine.optimizers import hidden_matrices
from samecurve.torch_engine.optimizers.user_optimizer import try_optimizer
from samecurve.torch_engine.randomness.dropout_layers import dropout_layers

BuildOptimizer = Callable[..., torch.optim.Optimizer]  # of parameters, lr and phase


def describe_model(
    adapter: TaskAdapter, config: Config, build_optimizer: BuildOptimizer
) -> Mapping[str, Any]:
    """The fields of Facts about the model. UserError: it has nothing to train."""
    model = _outline(adapter)
    if not any(p.requires_grad and p.numel() for p in model.parameters()):
        raise UserError(
            f"{adapter.name}.model() has no parameter to train",
            "nn.Parameters with requires_grad, in the module or its children",
            "task",
        )
    num_params = sum(map(_scalars, model.parameters()))
    try_samples = try_features if adapter.whole_batch else try_loss
    tried = try_samples(adapter, num_params, config.train.seed)
    named = dict(model.named_parameters())
    groups = config.optimizer.rules.describe(
        {name: _scalars(p) for name, p in named.items()},
        [name for name, p in named.items() if not p.requires_grad],
    )
    mode = TrainingMode(model)
    freeze(model, config.optimizer.rules)
    blocks = repeated_blocks(model) or [model]
    block_params = [sum(map(_scalars, block.parameters())) for block in blocks]
    after_step = adapter.methods.after_step
    return {
        **groups,
        "phases": _phase_facts(adapter, model),
        "user_optimizer": _optimizer_facts(adapter, config, model, build_optimizer),
        "after_step": "" if after_step is None else f"{adapter.name}.after_step()",
        "params": num_params,
        "blocks": len(blocks),
        "block_params": max(block_params),
        "packed": tuple(name for name, p in named.items() if _is_packed(p)),
        "block_packed": max(
            sum(p.numel() for p in block.parameters() if _is_packed(p)) for block in blocks
        ),
        **_frozen_facts(model),
        "coupled": (*adapter.methods.coupled, *coupling_layers(model)),
        "kept_in_eval": kept_in_eval(model),
        "from_pretrained": mode.from_pretrained,
        **describe_arrays(model),
        **sharding_facts(model),
        "hidden_matrices": hidden_matrices(model),
        "feature_bytes": None if tried is None else tried.feature_bytes,
        "keyed_dropout": dropout_layers(model),
        "not_same_bits": bits_hindrance(adapter, config, num_params),
        **work_facts(adapter, config, model, None if tried is None else tried.work),
    }


def _frozen_facts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The sizes of the blocks whose frozen weights could lie in host memory."""
    frozen = [block.parameters for block in frozen_blocks(model)]
    return {
        "frozen_block_params": tuple(sum(map(_scalars, block)) for block in frozen),
        "frozen_block_packed": tuple(
            sum(p.numel() for p in block if _is_packed(p)) for block in frozen
        ),
    }


def model_arrays(
    adapter: TaskAdapter, config: Config, model: nn.Module | None = None
) -> DescribedArrays:
    """The arrays of the model, and which of them are not trained.

    model: as it was built, perhaps without values; None: it is built
    """
    if model is None:
        model = _outline(adapter)
    freeze(model, config.optimizer.rules)
    frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    return DescribedArrays(**describe_arrays(model), frozen=frozen, frozen_base=adapter.frozen_base)


def _phase_facts(adapter: TaskAdapter, model: nn.Module) -> tuple[str, ...]:
    """Each phase in words. UserError: a parameter belongs to no phase, or to two."""
    if not adapter.phases:
        return ()
    sizes = {name: _scalars(p) for name, p in model.named_parameters() if p.requires_grad}
    by_phase = names_by_phase(list(sizes), adapter.phases)
    return tuple(
        f"{phase} ({sum(sizes[name] for name in names)} parameters)"
        for phase, names in by_phase.items()
    )


def _optimizer_facts(
    adapter: TaskAdapter, config: Config, model: nn.Module, build_optimizer: BuildOptimizer
) -> UserOptimizerFacts | None:
    """The facts about the class's own optimizer; None: the config's is used."""
    if adapter.methods.optimizer is None:
        return None
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    by_phase = {"": set(named)}
    if adapter.phases:
        by_phase = names_by_phase(list(named), adapter.phases)
    tried_ones = [
        try_optimizer(
            partial(build_optimizer, phase=phase),
            config.optimizer,
            {name: named[name] for name in named if name in names},
        )
        for phase, names in by_phase.items()
    ]
    states = [tried.num_states for tried in tried_ones if tried.num_states is not None]
    return UserOptimizerFacts(
        name=" and ".join(dict.fromkeys(tried.name for tried in tried_ones)),
        by=f"{adapter.name}.optimizer()",
        elementwise=adapter.methods.elementwise,
        takes_lr="lr" in parameters_of(adapter.methods.optimizer),
        scales=tuple(scale for tried in tried_ones for scale in tried.lr_scales),
        num_states=max(states) if len(states) == len(tried_ones) else None,
    )


def _outline(adapter: TaskAdapter) -> nn.Module:
    """The model without values, or with values where it can't be built without."""
    try:
        return without_values(adapter)
    except RuntimeError:
        with torch.random.fork_rng(devices=[]):
            model: nn.Module = adapter.model()
        return model


def without_values(adapter: TaskAdapter) -> nn.Module:
    """The model on the meta device. RuntimeError: its code looks at values."""
    with on_meta(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that go nowhere
        model: nn.Module = adapter.model()
    return model


def _scalars(parameter: torch.Tensor) -> int:
    """How many numbers a parameter holds; 0 for a packed one, which is counted apart."""
    if _is_packed(parameter):
        return 0
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _is_packed(parameter: torch.Tensor) -> bool:
    """Whether a parameter holds a frozen array's values in codes of a byte (quantized)."""
    return parameter.dtype in {torch.uint8, torch.int8}
