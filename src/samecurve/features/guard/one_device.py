"""Compares a sharded run with one device: the loss and its gradient for the same few samples, and
what an optimizer of the task makes of parts of arrays.

Where weights are sharded, all losses of the split check go through the strategy, so comparing them
with each other can't show that a library's model takes another branch there, because its modules
are wrapped or a group of processes exists. So the model is built once more, with whole weights and
outside of the strategy, where a whole copy has room.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.features.guard.additivity import GRADIENTS, SURE, compare_gradients, compare_repeats
from samecurve.features.guard.split_errors import explain_sharded
from samecurve.features.guard.trial_passes import Digests, digest, norms_of
from samecurve.features.guard.trials import RAISED, Rows, Trials, Tried, is_on_any_rank
from samecurve.features.guard.weights import Bits, weights_of
from samecurve.torch_engine.model.model_builder import ModelBuilder
from samecurve.torch_engine.step import EngineSetup, Update
from samecurve.torch_engine.strategies import Strategy
from samecurve.torch_engine.users_code.side_effects import attributes_kept

_NUMBERS, _UPDATES = 8, 3  # of an array, with which an optimizer is tried
_ARRAYS = 32  # at most
_LARGEST = 200_000_000  # parameters of a model that is computed whole
_ROOM = 4  # copies of the weights for which a GPU must have memory


class Comparison(NamedTuple):
    """The result of comparing a sharded run with one device."""

    error: UserError | None = None  # the loss or its gradient is another one on one device
    left_out: str = ""  # why they were not compared


def compare_with_one_device(setup: EngineSetup, trials: Trials, few: Rows) -> Comparison:
    """Compare the loss and its gradient for few samples. All ranks call it together."""
    if not _has_room(setup):
        return Comparison(left_out="the whole model is too large for one rank")
    try:
        with trials.trying(trials.step, few, [few]):
            sharded = trials.tried(few, with_gradient=True)
        trials.put_back()
        alone, written = _tried_on_one_device(setup, trials, few)
    except RAISED as error:
        trials.put_back()
        return Comparison(left_out=error.cause if isinstance(error, UserError) else f"{error}")
    if written:
        from samecurve.features.guard.diagnosis import write_error

        return Comparison(write_error(setup, written, lambda: None))
    one, other = alone.losses["loss"], sharded.losses["loss"]
    strategy = setup.plan.layout.strategy
    if finding := compare_repeats(one, other, SURE[trials.format]):
        return Comparison(explain_sharded(strategy, finding))
    if alone.gradients is None or sharded.gradients is None:
        return Comparison(left_out="its gradient can't be computed by itself")
    norms = norms_of(setup, sharded.gradients, [alone.gradients])
    finding = compare_gradients(other, [one], norms, GRADIENTS[trials.format])
    return Comparison(explain_sharded(strategy, finding) if finding else None)


def _has_room(setup: EngineSetup) -> bool:
    """Whether every rank has memory for the whole model, and its gradient, beside its shard."""
    parameters = list(setup.strategy.models[0].parameters())
    size = sum(parameter.numel() for parameter in parameters)
    lacks = size > _LARGEST
    if setup.device.type == "cuda" and not lacks:
        free, _ = torch.cuda.mem_get_info(setup.device)
        lacks = free < _ROOM * sum(p.numel() * p.itemsize for p in parameters)
    return not is_on_any_rank(setup, lacks)


def _tried_on_one_device(setup: EngineSetup, trials: Trials, few: Rows) -> tuple[Tried, str]:
    """The loss of a model that no strategy has laid out, and this process's parts of its gradient;
    and the name of a weight that the loss wrote into, which shards would not show.
    """
    task = getattr(setup.task, "task", setup.task)
    with ExitStack() as stack:
        stack.enter_context(attributes_kept(task))
        model = _whole_model(setup)
        stack.callback(_free_memory, model, setup.strategy.models[0])
        strategy = Strategy(setup.plan, setup.comm, setup.devices)
        strategy.models = [model]
        alone = Trials(replace(setup, strategy=strategy), trials.rows, trials.stage)
        alone.step, alone.phase_number = trials.step, trials.phase_number
        alone.format = trials.format
        stack.enter_context(alone.prepared())
        own, bits = _keep_own_parts(setup, model), Bits(weights_of(strategy))
        tried = alone.tried(few, with_gradient=True)
        written = next(iter(bits.written()), "")
    return (tried if tried.gradients is None else tried._replace(gradients=own)), written


def _whole_model(setup: EngineSetup) -> nn.Module:
    """The task's model, built anew, with the run's weights and copies of its buffers. Weights are
    gathered one at a time.
    """
    generator = torch.get_rng_state()
    model = ModelBuilder(setup).build(0)
    torch.set_rng_state(generator)
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[id(parameter)].append((module, name))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weights in setup.strategy.whole_weights():
            built = parameters.pop(name)
            whole = nn.Parameter(weights, requires_grad=built.requires_grad)
            for module, last in places[id(built)]:
                setattr(module, last, whole)
    for name, buffer in setup.strategy.models[0].named_buffers():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, buffer.clone())
    return model


def _free_memory(model: nn.Module, laid_out: nn.Module) -> None:
    """Empty the tensors of the model that was built anew. The model itself may live on for long: a
    layer whose forward() was replaced refers to itself.

    laid_out: the run's model, with which the other may share a module that the task keeps
    """
    shared = {id(tensor) for tensor in (*laid_out.parameters(), *laid_out.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in shared and tensor.layout is torch.strided:
            tensor.data = tensor.data.new_empty(0)
            tensor.grad = None


def _keep_own_parts(setup: EngineSetup, model: nn.Module) -> Digests:
    """This process's parts of the whole model's gradient, as often as ranks add up the same
    samples. They come to be in its backward pass, which lets go of each whole gradient at once: all
    of them would need more memory than a step.
    """
    own: Digests = {}
    laid_out = dict(setup.strategy.models[0].named_parameters())

    def keep(name: str, whole: nn.Parameter) -> None:
        gradient, whole.grad = whole.grad, None
        assert gradient is not None
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        part = setup.strategy.own_part(laid_out[name], dense) * setup.comm.world_size
        own[name] = own[name] + digest(part) if name in own else digest(part)

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            register: Any = parameter.register_post_accumulate_grad_hook
            register(partial(keep, name))
    return own


def refuse_joint_updates(setup: EngineSetup, updates: Sequence[Update]) -> None:
    """UserError: an optimizer of the task's, which is said to be elementwise, makes of halves of
    arrays something else than of whole ones.
    """
    task = getattr(setup.task, "task", setup.task)
    for update in updates:
        try:
            with attributes_kept(task):
                whole, halves = (_updated(update, parts, setup.device) for parts in (1, 2))
        except RAISED as error:  # it can't be used with so few numbers
            setup.notes.append(
                f"optimizer() of the task was not tried with halves of arrays: {error};"
                " samecurve verify compares whole steps"
            )
            continue
        if not torch.allclose(whole, halves, rtol=1e-9, atol=1e-9, equal_nan=True):
            raise UserError(
                "optimizer() of the task: it updates a number in another way"
                " where others are beside it, and elementwise = True says that it does not",
                "leave elementwise out of the task, with --strategy ddp",
                "task",
            )


def _updated(update: Update, parts: int, device: torch.device) -> torch.Tensor:
    """Arrays after some updates, of which each optimizer has a part; float64 [arrays, numbers]."""
    params, generator = update.trained[:_ARRAYS], torch.Generator().manual_seed(0)
    shape = (1 + _UPDATES, len(params), _NUMBERS)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(device)
    updated = []
    for values, *gradients in (part.unbind() for part in numbers.chunk(parts, dim=2)):
        views = [nn.Parameter(value.clone()) for value in values]
        trained = [replace(param, view=view) for param, view in zip(params, views, strict=True)]
        optimizer = update.make(trained, update.phase)
        for of_update in gradients:
            for view, gradient in zip(views, of_update, strict=True):
                view.grad = gradient.clone()
            optimizer.step(0.1, finite=True)
        updated.append(torch.stack([view.detach() for view in views]))
    return torch.cat(updated, dim=1)
