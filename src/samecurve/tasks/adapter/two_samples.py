"""The loss of two samples on a CPU, before anything is trained: whether there is one, of the right
form, and what it says of the run.
"""

from collections.abc import Mapping

import numpy as np
import torch

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import START
from samecurve.errors import UserError
from samecurve.tasks.adapter.engine_adapter import EngineAdapter
from samecurve.tasks.adapter.returned_tensors import check_loss
from samecurve.torch_engine.randomness.generators import GeneratorWatch
from samecurve.torch_engine.randomness.sample_numbers import keyed_trial
from samecurve.torch_engine.split_check.split_state import attributes_kept
from samecurve.torch_engine.step.gathered_features import Features, check_rows

# parameters at most of a model that is tried on two samples beforehand: a second or so
_TRIED = 50_000_000


def try_features(adapter: EngineAdapter, params: int, seed: int) -> int | None:
    """The bytes of one sample's features; and whether two samples have a loss.

    params: of the model, in numbers
    None: they can't be had here, which proves nothing of the run; its first step will tell.
    """
    if params > _TRIED or len(adapter.train_data()) < 2:
        return None
    with torch.random.fork_rng(devices=[]), torch.no_grad(), attributes_kept(adapter.task):
        torch.default_generator.manual_seed(seed)
        try:
            model, rows = adapter.model().eval(), _first_rows(adapter, 2)
            with keyed_trial(2):
                features: Features = adapter.task.features(
                    model, rows, **adapter.arguments_of("features", START)
                )
        except Exception:  # a model for GPUs only, say
            return None
        adapter.check_features(features)
        check_rows(features, 2)
        watch = GeneratorWatch(torch.device("cpu"))
        try:
            loss = adapter.task.batch_loss(features, **adapter.arguments_of("batch_loss", START))
            if isinstance(loss, Mapping):
                loss = loss["loss"]
        except Exception:  # of more samples than two, say
            return None
        check_loss(loss, f"{adapter.name}.batch_loss()")
        if drawn := watch.moved():
            raise UserError(
                f"{adapter.name}.batch_loss() draws random numbers ({', '.join(drawn)}): each"
                " device, which takes the loss of the whole batch, would draw its own",
                "draw them in features(), a row a sample",
                "task",
            )
    return sum(feature.nbytes for feature in features.values()) // 2


def try_loss(adapter: EngineAdapter, params: int, seed: int) -> list[Mean] | None:
    """The loss of two samples, and of each alone.

    params: of the model, in numbers
    None: it can't be had here, which proves nothing of the run; its first step will tell.
    """
    if params > _TRIED or len(adapter.train_data()) < 2:
        return None
    with torch.random.fork_rng(devices=[]), torch.no_grad(), attributes_kept(adapter.task):
        torch.default_generator.manual_seed(seed)
        model = adapter.model().eval()
        rows = _first_rows(adapter, 2)
        losses = []
        for ids in ([0, 1], [0], [1]):
            batch = {name: tensor[ids] for name, tensor in rows.items()}
            try:
                with keyed_trial(len(ids)):
                    loss = adapter.task.loss(model, batch, **adapter.arguments_of("loss", START))
                if isinstance(loss, Mapping):
                    loss = loss["loss"]
            except Exception:  # a model for GPUs only, say
                return None
            check_loss(loss, f"{adapter.name}.loss()")
            losses.append(Mean(*map(float, loss)))
    return losses


def _first_rows(adapter: EngineAdapter, count: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.ascontiguousarray(array))
        for name, array in adapter.train_data()[np.arange(count)].items()
    }
