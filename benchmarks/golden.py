"""This machine's losses beside the golden losses of ten small configs (golden_cases.py).

    python -m benchmarks.golden                  # on GPUs, real or emulated
    python -m benchmarks.golden --device cpu     # on CPU ranks
    python tests/emulated_cuda/run.py python -m benchmarks.golden --write   # renews golden.json

golden.json was written on emulated GPUs, which run the CPU's kernels, and its losses in f64 are
those of CPU ranks. A real GPU rounds in other places, so its losses may differ by what rounding
makes of them in these steps. In f64 and f32 that is what `samecurve verify` allows. In bf16 and f16
it is ROUNDINGS times what the precision itself has changed: the largest relative difference of the
golden losses to those in f64; but at least a quarter of a rounding unit, for a case whose roundings
happen to cancel out. Convolutions are computed without TF32 here.

Where losses are too far away, the same case is trained on this machine's CPUs. If the GPU
agrees with them, the libraries here make another run of the config (other initial weights, other
data), and that is no fault of the GPU.

Exit 0: all cases agree; 1: one does not, or none was trained.
"""

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import installed
from benchmarks.golden_cases import CASES, ROOT, Case
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.planner import plan
from samecurve.core.system.cache import cache_home
from samecurve.errors import RunError, SamecurveError
from samecurve.experiments.scratch import for_steps_alone, make_run, run_on_ranks
from samecurve.experiments.verify.verdicts import TOLERANCE
from samecurve.launch.pool import Pool, pool
from samecurve.observe import read_events
from samecurve.observe.text_table import Column, table_text
from samecurve.probe import probe
from samecurve.run.directory.attempt import Attempt
from samecurve.tasks import open_task
from samecurve.worker.jobs.train_job import try_out

FILE = Path(__file__).with_name("golden.json")
SAME = 1e-12  # relative: what CPU ranks and emulated GPUs may differ by in f64
LEAST = {"bf16": 2**-8 / 4, "f16": 2**-11 / 4}  # relative: a quarter of a rounding unit
ROUNDINGS = 4  # a GPU's roundings may add to the golden ones: twice, and twice that for its kernels
_OTHER_RUN = "the libraries here make another run"
_RANKS = 2
Losses = Mapping[str, Sequence[float]]  # of each step, by precision; all finite
_WRITTEN_WITH = ("torch", "transformers", "peft", "diffusers", "numpy")
_COLUMNS = (
    Column("case", width=10),
    Column("precision", width=9),
    Column("step", right=True, width=4),
    Column("difference", right=True, width=10),
    Column("allowed", right=True, width=8),
    Column("verdict", width=7),
    Column("why"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case in one precision. step, difference: where losses are furthest apart, relative.

    verdict: PASS, FAIL or SKIP; why: what there is to say about it
    """

    case: str
    precision: str
    verdict: str
    step: int | None = None
    difference: float | None = None
    allowed: float | None = None
    why: str = ""

    def cells(self) -> list[str]:
        known = self.difference is not None and self.allowed is not None
        numbers = [f"{self.difference:.1e}", f"{self.allowed:.1e}"] if known else ["-", "-"]
        step = "-" if self.step is None else str(self.step)
        return [self.case, self.precision, step, *numbers, self.verdict, self.why]


def train_without_tf32(index: int, group: Any, attempt: str) -> None:
    """The job of a warm rank."""
    import torch

    torch.backends.cudnn.allow_tf32 = False
    try_out(index, group, attempt)


@dataclass(frozen=True)
class Trainer:
    """Trains cases by warm ranks, each run in a directory of its own below `home`."""

    ranks: Pool
    machine: Machine
    home: Path

    def losses(self, case: Case, precision: str, kind: str) -> list[float]:
        """The losses of a case's steps. kind: of device, cpu or cuda.

        SamecurveError: the case could not be trained.
        """
        gpus = sum(device.kind == "cuda" for device in self.machine.devices)
        config = case.config_on(kind, precision, gpus if kind == "cuda" else _RANKS)
        facts = open_task(config, str(cache_home())).facts()
        made = for_steps_alone(plan(config, self.machine, facts))
        run = make_run(Path(tempfile.mkdtemp(dir=self.home)), config, made)
        attempt = Attempt("golden", str(run.home)).to_json()
        run_on_ranks(self.ranks, made, train_without_tf32, attempt)
        steps = (event for event in read_events(run.journal) if event.kind == "step")
        return [event.values["loss"] for event in steps]


def golden_losses() -> dict[str, Losses]:
    """The golden losses of each case."""
    cases = json.loads(FILE.read_text())["cases"]
    return {name: case["losses"] for name, case in cases.items()}


def furthest(losses: Sequence[float | None], golden: Sequence[float]) -> tuple[int, float]:
    """The step, from 1, whose losses differ most, and by how much, relative to the golden loss."""
    if len(losses) != len(golden):
        return min(len(losses), len(golden)) + 1, float("inf")
    differences = [
        abs(loss - wanted) / abs(wanted) if loss is not None else float("inf")
        for loss, wanted in zip(losses, golden, strict=True)
    ]
    worst = max(range(len(differences)), key=differences.__getitem__)
    return worst + 1, differences[worst]


def allowed(golden: Losses, precision: str) -> float:
    """How far a real GPU's losses may be from a case's golden ones, relative."""
    if precision in TOLERANCE:
        return TOLERANCE[precision]
    return max(LEAST[precision], ROUNDINGS * furthest(golden[precision], golden["f64"])[1])


def compare(
    name: str, golden: Losses, kind: str, train: Callable[[str, str], Sequence[float]]
) -> Iterator[Row]:
    """Compare a case in each precision.

    golden: the golden losses by precision
    train: takes a precision and a kind of device, and returns the losses
    """
    for precision, wanted in golden.items():
        most = allowed(golden, precision)
        row = Row(case=name, precision=precision, verdict="FAIL", allowed=most)
        try:
            losses = train(precision, kind)
            step, difference = furthest(losses, wanted)
            row = replace(row, step=step, difference=difference)
            if difference <= most:
                row = replace(row, verdict="PASS")
            elif kind == "cuda":
                row = _beside_cpus(row, furthest(losses, train(precision, "cpu")))
        except SamecurveError as error:
            row = replace(row, why=error.cause.splitlines()[0])
        yield row


def _beside_cpus(row: Row, found: tuple[int, float]) -> Row:
    """The row of losses far from the golden ones. found: the step and difference beside CPUs."""
    step, difference = found
    if row.allowed is not None and difference <= row.allowed:
        why = f"as this machine's CPUs, {row.difference:.1e} from the golden losses: {_OTHER_RUN}"
        return replace(row, verdict="PASS", step=step, difference=difference, why=why)
    return replace(row, why=f"{difference:.1e} from this machine's CPUs, at step {step}")


def compare_all(kind: str, names: Sequence[str], seconds: float = math.inf) -> Iterator[Row]:
    """Compare cases with golden.json. seconds: no case begins after that time."""
    golden, began = golden_losses(), time.monotonic()
    with trainer() as trains:
        for name in names:
            missing = CASES[name].missing()
            if missing:
                why = f"{missing} is not installed"
            elif time.monotonic() - began > seconds:
                why = f"no time left: {seconds:g} s"
            else:
                train = partial(trains.losses, CASES[name])
                yield from compare(name, golden[name], kind, train)
                continue
            yield Row(case=name, precision="all", verdict="SKIP", why=why)


@contextmanager
def trainer() -> Iterator[Trainer]:
    """Two warm ranks, whose runs lie in a directory that is removed at the end."""
    with (
        chdir(ROOT),  # the cases name files of the repository
        tempfile.TemporaryDirectory(prefix="golden-") as scratch,
        pool(_RANKS, Path(scratch, "ranks.log")) as ranks,
    ):
        yield Trainer(ranks, probe(), Path(scratch))


def written(names: Sequence[str]) -> dict[str, Any]:
    """The golden losses of cases, by emulated GPUs. RunError: CPU ranks have others in f64."""
    cases = {}
    with trainer() as trains:
        for name in names:
            case = CASES[name]
            losses = {
                precision: trains.losses(case, precision, "cuda")
                for precision in ("f64", case.precision)
            }
            step, apart = furthest(losses["f64"], trains.losses(case, "f64", "cpu"))
            if apart > SAME:
                raise RunError(
                    f"{name}: in f64 emulated GPUs are {apart:.1e} away from CPU ranks, at step"
                    f" {step}; {SAME:g} is allowed",
                    "find out which of the two is wrong; golden.json stays as it is",
                )
            limits = {precision: allowed(losses, precision) for precision in losses}
            cases[name] = {"command": case.command("f64"), "losses": losses, "allowed": limits}
            print(f"{name}: {losses['f64'][0]:.4f} .. {losses['f64'][-1]:.4f}", flush=True)
    return cases


def write(names: Sequence[str], file: Path) -> None:
    """Renew cases of a file; its other cases stay."""
    cases = json.loads(file.read_text())["cases"] if file.exists() else {}
    cases |= written(names)
    known = {
        "written_with": {"python": platform.python_version(), **installed(_WRITTEN_WITH)},
        "cases": {name: cases[name] for name in CASES if name in cases},
    }
    file.write_text(json.dumps(known, indent=1) + "\n")


def print_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Print each row of the table as soon as it is known, and hand it on."""
    for number, row in enumerate(rows):
        print(table_text(_COLUMNS, [row.cells()], titles=not number), flush=True)
        yield row


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", default=",".join(CASES), help="of these; all if not given")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after these")
    parser.add_argument("--write", action="store_true", help="renew golden.json; on emulated GPUs")
    parser.add_argument(
        "--out", type=Path, default=FILE, help="of --write, in place of golden.json"
    )
    arguments = parser.parse_args(words)
    arguments.cases = arguments.cases.split(",")
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f"--cases: {', '.join(unknown)}: not among {', '.join(CASES)}")
    if arguments.write and os.environ.get("EMULATED_CUDA") != "1":
        parser.error(
            "--write is for emulated GPUs: python tests/emulated_cuda/run.py python -m"
            " benchmarks.golden --write"
        )
    if arguments.device == "cuda" and not probe().devices:
        parser.error("no GPU here; --device cpu compares CPU ranks")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    arguments = parsed(words)
    if arguments.write:
        try:
            write(arguments.cases, arguments.out)
        except SamecurveError as error:
            sys.exit(f"error: {error}")
        return
    rows = compare_all(arguments.device, arguments.cases, arguments.seconds)
    verdicts = [row.verdict for row in print_rows(rows)]
    sys.exit(int("FAIL" in verdicts or "PASS" not in verdicts))


if __name__ == "__main__":
    main()
