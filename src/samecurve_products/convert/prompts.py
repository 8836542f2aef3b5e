"""Prompts of other tools' configs, of which pictures are shown while a model trains.

None of it changes what is trained: here all prompts share a negative prompt, a number of steps and
a guidance scale, those of the first prompt where they differ.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from samecurve_products.convert.foreign_config import ForeignConfig
from samecurve_products.convert.values import is_number

_FLAG = re.compile(r"\s--([a-z]+)\s+(?:(.*?))(?=\s--[a-z]|$)")


@dataclass(frozen=True)
class Prompt:
    """A prompt, and how its picture is made; None: the pipeline's own."""

    text: str
    negative: str | None = None
    steps: int | None = None
    guidance: float | None = None


def write_prompts(foreign: ForeignConfig, prompts: Sequence[Prompt], place: str) -> str:
    """Set data.prompts and what belongs to it. Returns what was not taken over, or ''."""
    if not prompts:
        return ""
    first = prompts[0]
    foreign.document.set("data.prompts", [prompt.text for prompt in prompts], place)
    values = {
        "negative_prompt": first.negative,
        "sample_steps": first.steps,
        "guidance": first.guidance,
    }
    for key, value in values.items():
        if value not in (None, "") and not foreign.is_set(f"data.{key}"):
            foreign.document.set(f"data.{key}", value, place)
    alike = all(
        (prompt.negative, prompt.steps, prompt.guidance)
        == (first.negative, first.steps, first.guidance)
        for prompt in prompts
    )
    return "" if alike else "steps, guidance and negative prompt are those of the first prompt"


def prompt_of(fields: dict[str, object], names: Sequence[str]) -> Prompt | None:
    """The prompt of a mapping. None: it has no text.

    names: of its text, negative text, steps and guidance
    """
    text, negative, steps, guidance = (fields.get(name) for name in names)
    if not isinstance(text, str) or not text:
        return None
    return Prompt(
        text,
        negative if isinstance(negative, str) else None,
        int(steps) if is_number(steps) and math.isfinite(steps) else None,
        float(guidance) if is_number(guidance) and math.isfinite(guidance) else None,
    )


def prompts_of_lines(text: str) -> list[Prompt]:
    """The prompts of kohya's text file: a line each, with `--n NEGATIVE --s STEPS --l GUIDANCE`.

    Lines that begin with # are comments.
    """
    prompts = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        flags = dict(_FLAG.findall(f" {line}"))
        words = re.split(r"\s--[a-z]+\s", f" {line}", maxsplit=1)[0].strip()
        prompts.append(
            Prompt(
                words,
                flags.get("n"),
                int(flags["s"]) if flags.get("s", "").isdigit() else None,
                _float(flags.get("l")),
            )
        )
    return prompts


def _float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
