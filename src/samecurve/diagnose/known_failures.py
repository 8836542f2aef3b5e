"""Known failures: an error's text, and what known_failures.yaml says of its cause and remedy."""

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from samecurve.core.system.installation import install_command

Symptom = Literal["", "lost", "waited"]
_INSTALL = re.compile(r"pip install -e '\.\[([\w,]+)\]'")


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """An entry of known_failures.yaml; the head of that file explains the fields."""

    name: str
    patterns: tuple[re.Pattern[str], ...]
    cause: str
    remedy: str
    again: bool = False
    symptom: Symptom = ""

    def explain(self, match: re.Match[str]) -> "Diagnosis":
        """The cause and the remedy, with the names and numbers of this match filled in."""
        texts = {name: " ".join((text or "").split()) for name, text in match.groupdict().items()}
        groups = defaultdict(str, texts)
        cause = self.cause.format_map(groups).replace("()", "")  # a group that matched nothing
        cause = re.sub(r" +", " ", cause).rstrip(" :")
        remedy = self.remedy.format_map(groups)
        remedy = _INSTALL.sub(lambda command: install_command(command[1]), remedy)
        return Diagnosis(self, cause, remedy)


@dataclass(frozen=True)
class Diagnosis:
    """A known failure, with its cause and remedy in this case."""

    known: KnownFailure
    cause: str
    remedy: str


@cache  # read only once something has failed
def known_failures() -> tuple[KnownFailure, ...]:
    """All known failures, the more specific first."""
    text = (files("samecurve.diagnose") / "known_failures.yaml").read_text(encoding="utf-8")
    return tuple(map(_from_entry, yaml.safe_load(text)))


def _from_entry(entry: dict[str, Any]) -> KnownFailure:
    patterns = entry.pop("patterns")
    several = patterns if isinstance(patterns, list) else [patterns]
    compiled = tuple(re.compile(pattern, re.MULTILINE) for pattern in several)
    return KnownFailure(patterns=compiled, **entry)


def diagnose(text: str) -> Diagnosis | None:
    """The known failure that an error's text shows; None: no entry matches."""
    for known in known_failures():
        for pattern in known.patterns:
            if match := pattern.search(text):
                return known.explain(match)
    return None
