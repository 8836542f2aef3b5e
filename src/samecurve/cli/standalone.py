"""The scripts run_hf_standalone.py and run_fsdp_standalone.py: `samecurve train` with a model and a
strategy, started as users of such scripts start them. And train_multi_gpu.py: `samecurve train` on
all GPUs.

Under torchrun each process is a rank. A plain start of the first two uses one device; where there
are more, it says so, and prints the line that uses them.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.cli.main import find_verb, main
from samecurve.terminal import echo

_GLOBAL_BATCH, _PER_DEVICE = 64, 1
_PLACES = ("devices", "gpus", "num_gpus")  # flags that say which devices


@dataclass(frozen=True)
class Standalone:
    """A script of this kind."""

    script: str
    config: Path  # what it trains where the user types no -f
    strategy: str  # on several devices

    def command_line(
        self, arguments: Sequence[str], environment: Mapping[str, str], gpus: int
    ) -> tuple[list[str], str]:
        """The arguments for `samecurve`, and a note to print first, or ''.

        The script's own values come first, so that flags win.

        gpus: how many are visible
        """
        from samecurve.worker import started

        typed = _typed(arguments)
        defaults = ["-f", str(self.config), "--strategy", self.strategy]
        if not typed.get("grad_accum"):
            defaults += ["--global-batch", str(_GLOBAL_BATCH)]
        defaults += ["--batch-size", str(_PER_DEVICE)]
        note = ""
        if not started(environment) and not any(typed.get(flag) for flag in _PLACES):
            if gpus:
                defaults += ["--gpus", "0"]
            if gpus > 1:
                line = ["torchrun", f"--nproc_per_node={gpus}", self.script, *arguments]
                note = (
                    f"note   {gpus} GPUs are visible, and a plain start of Python uses one, GPU 0;"
                    f" all of them: {shlex.join(line)}"
                )
        return ["train", *defaults, *arguments], note


def _typed(arguments: Sequence[str]) -> Mapping[str, object]:
    """The typed flags by name; `train` itself reports wrong ones."""
    return find_verb("train").make_context("train", list(arguments), resilient_parsing=True).params


def run_standalone(standalone: Standalone) -> None:
    """Run the script; it ends as `samecurve train` does, errors included."""
    from samecurve.probe import find_gpus

    gpus = len(find_gpus(os.environ).devices)
    words, note = standalone.command_line(sys.argv[1:], os.environ, gpus)
    if note:
        echo(note, err=True)
    sys.argv = ["samecurve", *words]
    main()


def on_all_gpus(arguments: Sequence[str], environment: Mapping[str, str], gpus: int) -> list[str]:
    """The arguments for `samecurve` of train_multi_gpu.py.

    gpus: how many are visible. All are taken where neither a flag nor a launcher says which
    """
    from samecurve.worker import started

    typed = _typed(arguments)
    free = gpus and not started(environment) and not any(typed.get(flag) for flag in _PLACES)
    return ["train", *(["--num-gpus", "0"] if free else []), *arguments]


def run_on_all_gpus() -> None:
    """Run train_multi_gpu.py; it ends as `samecurve train` does, errors included."""
    from samecurve.probe import find_gpus

    gpus = len(find_gpus(os.environ).devices)
    sys.argv = ["samecurve", *on_all_gpus(sys.argv[1:], os.environ, gpus)]
    main()
