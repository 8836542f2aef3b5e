"""What a run's model makes: its newest checkpoint, a prompt, a continuation. Runs in this process, on one device."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.format import MANIFEST, Damaged, load, verify
from lockstep.checkpoint.store import newest
from lockstep.core.protocols import Saved
from lockstep.errors import RunError, UserError
from lockstep.launch.files import Run
from lockstep.tasks import Tasks, open_saved


@dataclass(frozen=True)
class Sampled:
    """text: prompt and continuation. step: of the checkpoint. notes: what the user should know (a damaged checkpoint passed over)."""

    text: str
    step: int
    notes: list[str]


def sample(path: Path, prompt: str, tokens: int, temperature: float, seed: int, device: str) -> Sampled:
    """path: a run directory (its newest whole checkpoint) or one checkpoint. UserError: neither, or none saved yet."""
    import torch

    where = _device(device)
    run, saved, weights, notes = _weights(path)
    config = run.read_config(Tasks())
    model, speak = open_saved(config, run.assets, {name: array.shape for name, array in weights.items()})
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()}, strict=False)
    model = model.to(where).eval()
    text: Any = speak(model, prompt, tokens, temperature, seed)
    return Sampled(str(text), saved.step, notes)


def _weights(path: Path) -> tuple[Run, Saved, dict[str, Any], list[str]]:
    """All of a model's arrays, read at once: a live run may take an older checkpoint away at any time, and then there is a newer one."""
    for tries_left in range(4, -1, -1):
        run, checkpoint, notes = find(path)
        try:
            saved = load(checkpoint)
            return run, saved, {name.removeprefix("model/"): array for name, array in saved.arrays.items() if name.startswith("model/")}, notes
        except (RunError, OSError):
            if not tries_left or checkpoint.exists():
                raise
    raise AssertionError("unreachable")


def find(path: Path) -> tuple[Run, Path, list[str]]:
    if (path / MANIFEST).is_file():
        try:
            verify(path)
        except Damaged as error:
            raise UserError(f"checkpoint {path}: {error}", "name the run directory: its newest whole checkpoint is taken", "RUN") from None
        return Run(path.resolve().parent.parent), path, []
    run = Run(path)
    if not run.exists():
        raise UserError(f"{path} is neither a run directory nor a checkpoint", "a directory that `lockstep train` made, such as runs/tiny-20260101-120000", "RUN")
    found, damaged = newest(run.checkpoints)
    if found is None:
        raise UserError(f"{path} has no whole checkpoint yet" + "".join(f"; {line}" for line in damaged), "let it train until it has saved (train.save_every)", "RUN")
    return run, found, damaged


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"--device {name} is none", "auto, cpu, cuda, or cuda:1", "--device")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {name}: no GPU found", "--device cpu", "--device")
    return name
