"""Faults of ranks, planted in the ranks themselves: the launcher starts them again by itself."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chaos_jobs import SAVE, ChaosError, Job, Lab, Outcome, require
from planted import AT_START, OF_FIRST_RANK, Fired, Plant

from samecurve.core.events import Event

IN_A_STEP = (
    *("data", "forward", "backward", "reduce", "reduce begun"),
    *("update", "half an update", "updated"),
)
IN_A_SAVE = (
    *("save", "half a shard", "shard", "marker", "manifest", "rename", "renamed"),
    *("removal", "half a removal", "journal"),
)
ELSEWHERE = (*AT_START, "evaluate", "end")
DAMAGES = (
    *("flip_bit", "cut_file", "remove_file"),
    *("flip_bit_of_manifest", "cut_manifest", "remove_manifest"),
)
SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGTERM", "SIGILL")
_GAP = SAVE + 1  # steps between two faults, so that each start gets to a save


@dataclass(frozen=True)
class RankFault:
    """A fault of a rank that its launcher answers with a new start."""

    kind: str
    where: str
    rank: int
    how: str = "SIGKILL"
    value: float = 0.0
    says: str = r"rank {rank} was ended by SIGKILL"
    saves_lost: int = 1  # at most; 2: the fault destroys the newest

    @property
    def what(self) -> str:
        how = "" if self.how == "SIGKILL" else f"{self.how} "
        return f"{how}rank {self.rank}, {self.where}"


def kills() -> list[RankFault]:
    """kill -9 of each rank in each place."""
    rows = {"in a step": IN_A_STEP, "around a save": IN_A_SAVE, "elsewhere": ELSEWHERE}
    return [
        RankFault(f"kill -9 of a rank, {name}", where, rank)
        for name, places in rows.items()
        for where in places
        for rank in ((0,) if where in OF_FIRST_RANK else (0, 1))
    ]


def signals() -> list[RankFault]:
    return [
        RankFault(
            "other signals to a rank", where, rank, how, says=f"rank {rank} was ended by {how}"
        )
        for how in SIGNALS
        for where, rank in (("forward", 1), ("shard", 0))
    ]


def damages() -> list[RankFault]:
    """The newest checkpoint is damaged in the moment of a kill."""
    return [
        RankFault("a damaged newest checkpoint", "save", rank, how, float(rank), saves_lost=2)
        for how in DAMAGES
        for rank in (0, 1)
    ]


def hangs() -> list[RankFault]:
    stopped = r"rank {rank} stopped \(SIGSTOP"
    silent = r"rank {rank} gave no sign for"
    return [
        *(
            RankFault("SIGSTOP of a rank", "forward", rank, "SIGSTOP", says=stopped)
            for rank in (0, 1)
        ),
        RankFault("SIGSTOP of a rank", "data", 1, "SIGSTOP", says=stopped),
        *(
            RankFault("a rank that hangs", where, rank, "sleep", 1000.0, silent)
            for where, rank in (("data", 1), ("forward", 0))
        ),
    ]


def in_order(faults: Sequence[RankFault], chance: random.Random) -> list[RankFault]:
    """The faults in a random order in which a start fails three times in a row at most.

    A fault of a start leaves the run where it was, so these are spread over the others. What comes
    when all is trained comes last.
    """
    starts = [fault for fault in faults if fault.where in AT_START]
    last = [fault for fault in faults if fault.where == "end"]
    order = [fault for fault in faults if fault not in starts and fault not in last]
    chance.shuffle(order)
    for number, fault in enumerate(starts):
        order.insert(1 + number * max(len(order) // (len(starts) + 1), 2), fault)
    return [*order, *last]


def run_rank_faults(
    lab: Lab,
    faults: Sequence[RankFault],
    *flags: object,
    floor: int = 60,
    environment: Mapping[str, str] | None = None,
    program: str = "",
) -> list[Outcome]:
    """One job with these faults, each in a start of its own.

    program: Python that the launcher runs before it begins, in a test build of it.
    """
    steps = (len(faults) + 2) * _GAP
    job = lab.job("", steps, restarts=len(faults), floor=floor, environment=environment or {})
    job.plant(
        [
            Plant(fault.where, fault.rank, _GAP * (number + 1), fault.how, fault.value)
            for number, fault in enumerate(faults)
        ]
    )
    try:
        words = job.words(*flags)
        if program:
            words[1:3] = ["-c", f"{program}\nfrom samecurve.cli.entry import run\nrun()"]
        ended = job.train(words=words)
        require(ended.code == 0, f"exit code {ended.code}: {ended.text[-1500:]}")
        job.check_no_orphans()
        if all(fault.saves_lost == 1 for fault in faults):
            job.check_undamaged()
        job.check_equal(lab.unfailed(steps))
    except ChaosError as error:
        return [Outcome(f.kind, f.what, recovered=False, note=str(error)) for f in faults]
    lines = job.lines()
    starts = [number for number, event in enumerate(lines) if event.kind == "restarted"]
    if len(starts) != len(faults):
        note = f"{len(starts)} new starts after {len(faults)} faults"
        return [Outcome(f.kind, f.what, recovered=False, note=note) for f in faults]
    return [
        _judge(job, fault, number, lines[start], start)
        for number, (fault, start) in enumerate(zip(faults, starts, strict=True))
    ]


def _judge(job: Job, fault: RankFault, number: int, restarted: Event, line: int) -> Outcome:
    fired = job.fired(number)
    try:
        require(fired is not None, "it did not happen")
        assert fired is not None
        cause, says = str(restarted.values["cause"]), fault.says.format(rank=fault.rank)
        require(bool(re.match(says, cause)), f"the message was: {cause}")
        if fault.saves_lost > 1:
            warned = str(job.lines()[line + 1].values.get("text"))
            require(" is damaged: " in warned, f"the damage was not seen: {warned}")
        lost = _lost(fired, restarted.step, fault.saves_lost)
        seconds = job.seconds_after(fired.time, line)
    except ChaosError as error:
        return Outcome(fault.kind, fault.what, recovered=False, note=str(error))
    return Outcome(fault.kind, fault.what, True, lost, seconds)


def _lost(fired: Fired, resumed: int, saves: int) -> int:
    """The steps that were trained again. ChaosError: more than a fault may cost.

    A checkpoint is written beside the training: what the newest save had not ended when the fault
    came, the one before it has.
    """
    behind = fired.saving - resumed
    require(behind <= SAVE * saves, f"{behind} steps before the newest save begun")
    return max(fired.step - resumed, 0)
