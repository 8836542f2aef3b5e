"""One known failure: patterns of an error's text, what it means and what to do."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from samecurve.core.system.installation import install_command

Symptom = Literal["", "lost", "waited"]
_INSTALL = re.compile(r"pip install 'samecurve\[([\w,]+)\]'")  # as the page has it


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """One row of the table, also of docs/failures.md."""

    name: str
    patterns: tuple[re.Pattern[str], ...]  # of an error's text
    cause: str  # over the groups of the pattern that matched: {port}
    remedy: str  # likewise
    again: bool = False  # starting again may help
    symptom: Symptom = ""  # it may only have lost another rank, or waited for it

    def explain(self, match: re.Match[str]) -> "Diagnosis":
        """Cause and remedy with the names and numbers of this match."""
        texts = {name: " ".join((text or "").split()) for name, text in match.groupdict().items()}
        groups = defaultdict(str, texts)
        cause = self.cause.format_map(groups).replace("()", "")  # a group that matched nothing
        cause = re.sub(r" +", " ", cause).rstrip(" :")
        remedy = self.remedy.format_map(groups)
        remedy = _INSTALL.sub(lambda command: install_command(command[1]), remedy)
        return Diagnosis(self, cause, remedy)


@dataclass(frozen=True)
class Diagnosis:
    """A known failure as it happened here."""

    known: KnownFailure
    cause: str
    remedy: str


def known(
    name: str,
    *,
    patterns: Sequence[str],
    cause: str,
    remedy: str,
    again: bool = False,
    symptom: Symptom = "",
) -> KnownFailure:
    return KnownFailure(
        name=name,
        patterns=tuple(re.compile(pattern, re.MULTILINE) for pattern in patterns),
        cause=cause,
        remedy=remedy,
        again=again,
        symptom=symptom,
    )
