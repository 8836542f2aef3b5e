"""What trackers plot of an event: names and numbers, the same for each of them."""

from pathlib import Path

from samecurve.core.events import Event

_GROUPS = {"step": "train", "evaluated": "eval", "sensors": "sensors"}
_PNG = b"\x89PNG\r\n\x1a\n"


def figures(event: Event) -> dict[str, float]:
    """'train/loss': 2.31, 'eval/perplexity': 10.1, 'sensors/utilisation/0': 0.97.

    What is not known or not finite is left out.
    """
    group = _GROUPS.get(event.kind)
    found: dict[str, float] = {}
    if group is None:
        return found
    for name, value in event.values.items():
        if isinstance(value, list):
            short = name.removesuffix("_by_device")
            found |= {
                f"{group}/{short}/{index}": item
                for index, item in enumerate(value)
                if _number(item)
            }
        elif _number(value):
            found[f"{group}/{name}"] = value
    return found


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def pictures(event: Event) -> list[str]:
    """The pictures of a `sampled` event: PNG files, their paths relative to the run directory."""
    return [str(path) for path in event.values.get("pictures", ())]


def png(run: Path, name: str) -> bytes:
    """A picture's bytes.

    ValueError: it is none, or lies outside the run directory. OSError: it can't be read.
    """
    path = (run / name).resolve()
    if not path.is_relative_to(run.resolve()):
        raise ValueError("it lies outside the run directory")
    content = path.read_bytes()
    if not content.startswith(_PNG) or len(content) < 24:
        raise ValueError("it is no PNG")
    return content
