"""Samples of a run's model, made from its newest checkpoint in this process, on one device."""

import inspect
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.core.protocols import Sample
from samecurve.errors import UserError
from samecurve.observe.pictures import keep_pictures
from samecurve.run.weights.opened_checkpoint import open_checkpoint
from samecurve.run.weights.trained_model import trained_model
from samecurve.tasks.protocol import MEMBERS

if TYPE_CHECKING:
    from samecurve.tasks.adapter import TaskAdapter

_TOKENS, _TEMPERATURE = 200, 0.8


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """How a text begins and goes on. None: the option is not set."""

    text: str | None = None
    tokens: int | None = None  # length of the continuation
    temperature: float | None = None  # 0: always the likeliest token
    seed: int = 0
    chat: bool | None = None  # the text is a turn of a conversation; None: as in training


@dataclass(frozen=True)
class Sampled:
    """The samples of a model."""

    texts: list[str]
    pictures: list[str]  # their files
    step: int  # of the checkpoint
    notes: list[str]  # what the user should know (a damaged checkpoint passed over)


def sample(path: Path, prompt: Prompt, device: str, *, trust: bool = False) -> Sampled:
    """Sample the model of a run (its newest whole checkpoint), or of one checkpoint.

    UserError: the path is neither, nothing is saved yet, or the task makes nothing to show.
    """
    checkpoint = open_checkpoint(path, trust=trust)
    task = checkpoint.task
    _check_can_sample(task, checkpoint.config.task, prompt)
    model = task.place(trained_model(checkpoint), _device(device, task.engine))
    samples = _samples(task, model, prompt)
    texts = [sample for sample in samples if isinstance(sample, str)]
    pictures = [sample for sample in samples if not isinstance(sample, str)]
    files = []
    if pictures:
        names = keep_pictures(checkpoint.run.home, checkpoint.step, pictures, asked=True)
        files = [str(checkpoint.run.home / name) for name in names]
    return Sampled(texts, files, checkpoint.step, checkpoint.notes)


def _samples(task: "TaskAdapter", model: object, prompt: Prompt) -> Sequence[Sample]:
    if task.methods.respond is None:
        return task.sample(model, prompt.seed, prompt=prompt.text)
    tokens = _TOKENS if prompt.tokens is None else prompt.tokens
    temperature = _TEMPERATURE if prompt.temperature is None else prompt.temperature
    chat = {} if prompt.chat is None else {"chat": prompt.chat}
    text = task.respond(
        model, prompt.text or "", tokens=tokens, temperature=temperature, seed=prompt.seed, **chat
    )
    return [text]


def _check_can_sample(task: "TaskAdapter", name: str, prompt: Prompt) -> None:
    """Compare the options with the task. UserError: its class lacks a method that they need."""
    flag = "--no-chat" if prompt.chat is False else "--chat"
    if prompt.chat is not None and "chat" not in _parameters(task.methods.respond):
        raise UserError(f"{name} knows no turns of a conversation", "leave it out", flag)
    if task.methods.respond is not None:
        return
    if task.methods.sample is None:
        raise UserError(
            f"{name} makes nothing to show: its class has neither respond() nor sample()",
            f"{MEMBERS['respond']}\n    or {MEMBERS['sample']}",
            "RUN",
        )
    values: dict[str, object] = {"--tokens": prompt.tokens, "--temperature": prompt.temperature}
    if "prompt" not in _parameters(task.methods.sample):
        values["--prompt"] = prompt.text
    for flag, value in values.items():
        if value is not None:
            raise UserError(
                f"{name} shows what its sample() makes, and takes no {flag}: its class has no"
                " respond()",
                f"leave it out, or write {MEMBERS['respond']}",
                flag,
            )


def _parameters(function: Any) -> Collection[str]:
    return () if function is None else inspect.signature(function).parameters


def _device(name: str, engine: str) -> str:
    """Choose the device: cpu or cuda:N. UserError: there is no device of this name."""
    if name != "auto" and not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(
            f"--device {name}: there is no such device", "auto, cpu, cuda, or cuda:1", "--device"
        )
    if name == "cpu":
        return name
    has_gpu = _has_gpu(engine)
    if name == "auto":
        return "cuda" if has_gpu else "cpu"
    if not has_gpu:
        raise UserError(f"--device {name}: no GPU found", "--device cpu", "--device")
    return name


def _has_gpu(engine: str) -> bool:
    if engine == "jax":
        import jax

        return any(device.platform == "gpu" for device in jax.devices())
    import torch

    return torch.cuda.is_available()
