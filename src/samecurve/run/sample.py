"""What a run's model makes: its newest checkpoint, a prompt, a continuation.

Runs in this process, on one device.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from samecurve.errors import UserError
from samecurve.run.load import find
from samecurve.tasks import speaking


@dataclass(frozen=True)
class Sampled:
    """text: prompt and continuation.

    step: of the checkpoint. notes: what the user should know (a damaged checkpoint passed over).
    """

    text: str
    step: int
    notes: list[str]


def sample(
    path: Path, prompt: str, tokens: int, temperature: float, seed: int, device: str
) -> Sampled:
    """path: a run directory (its newest whole checkpoint) or one checkpoint.

    UserError: neither, or none saved yet.
    """
    where = _device(device)
    found = find(path)
    speak = speaking(found.config, found.run.assets)
    return Sampled(
        speak(found.model().to(where), prompt, tokens, temperature, seed), found.step, found.notes
    )


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"--device {name} is none", "auto, cpu, cuda, or cuda:1", "--device")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {name}: no GPU found", "--device cpu", "--device")
    return name
