"""Who holds up the other ranks of a hanging run, where every rank is, and what helps.

The verdict follows from one snapshot of each rank: its last heartbeat, its process state, the stack
of its main thread, and the last collective that it entered.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from samecurve.core.events import Beat
from samecurve.watch import HangLimit
from samecurve.watch.silence import Silence, furthest_behind
from samecurve.watch.stacks import Location


@dataclass(frozen=True)
class Collective:
    """The last collective that a rank entered."""

    number: int  # counted by every rank in the same order, over all process groups
    name: str
    sizes: str
    ended: bool  # False: the rank still waits in it


@dataclass(frozen=True)
class RankSnapshot:
    """A snapshot of one rank of a hanging run."""

    beat: Beat | None
    process_state: str = ""  # as the kernel names it (T: stopped)
    location: Location | None = None  # where its program is; None: the rank did not answer
    collective: Collective | None = None  # None: unknown

    @property
    def is_stopped(self) -> bool:
        return self.process_state == "T"

    @property
    def waits_in(self) -> Collective | None:
        """The collective that the rank waits in, if any."""
        if self.collective and not self.collective.ended:
            return self.collective
        return None


Snapshots = Mapping[int, RankSnapshot]  # by rank


@dataclass(frozen=True)
class Verdict:
    """The explanation of a hang."""

    culprits: tuple[int, ...]  # ranks that hold up the others; empty: not known
    cause: str
    remedy: str
    again: bool = True  # starting again may help


def judge(
    snapshots: Snapshots,
    silence: Silence,
    limit: HangLimit,
    *,
    world_size: int,
    left: Sequence[int] = (),
) -> Verdict:
    """Decide which rank holds up the others, and what to say about it.

    silence: how long the ranks were silent, and were allowed to be
    limit: the settings of the watch; a remedy names its option
    world_size: the number of all ranks; ranks of other hosts are not among the snapshots
    left: ranks that have ended with 0
    """
    where = describe_all(snapshots, limit.unit)
    stopped = [rank for rank, snapshot in snapshots.items() if snapshot.is_stopped]
    if stopped:
        return Verdict(
            tuple(stopped),
            f"{name_ranks(stopped)} stopped (SIGSTOP, or a terminal's Ctrl-Z) for"
            f" {silence.seconds:.0f} s: {where}",
            f"whoever stopped it can let it go on with `kill -CONT`; {limit.option}N waits N"
            " seconds for that",
        )
    mismatch = _describe_mismatch(snapshots)
    if mismatch:
        return Verdict(
            (),
            "the ranks are in different collectives, which wait for each other for ever:"
            f" {mismatch}",
            "every rank must make the same calls with the same shapes: look for a condition on the"
            " rank, or data of unequal length",
            again=False,
        )
    longer = round(max(2 * silence.seconds, silence.limit))
    wait_longer = f"if that is how long it takes, {limit.option}{longer} waits longer"
    if left:
        return _judge_departure(left, silence, where, wait_longer)
    culprits = _find_culprits(snapshots) if len(snapshots) == world_size else []
    return _judge_silence(snapshots, culprits, silence, where, wait_longer)


def _judge_departure(
    left: Sequence[int], silence: Silence, where: str, wait_longer: str
) -> Verdict:
    from samecurve.diagnose.crash import SAME_CALLS

    return Verdict(
        tuple(left),
        f"{name_ranks(left)} left with exit code 0 before the others were done, which have made no"
        f" progress for {_show(silence)}: {where}",
        f"{SAME_CALLS}; {wait_longer}",
    )


def _judge_silence(
    snapshots: Snapshots, culprits: Sequence[int], silence: Silence, where: str, wait_longer: str
) -> Verdict:
    """The verdict where nothing but the silence itself is known."""
    if not culprits:
        return Verdict(
            (),
            f"no rank has made any progress for {_show(silence)}: {where}",
            f"all wait for each other, or for what is outside the program; {wait_longer}",
        )
    remedy = wait_longer
    if _waits_for_data([snapshots[rank] for rank in culprits]):
        remedy = f"--num-workers or a quicker source, if the data is slow; {wait_longer}"
    return Verdict(
        tuple(culprits),
        f"{name_ranks(culprits)} gave no sign for {_show(silence)}: {where}",
        remedy,
    )


def _show(silence: Silence) -> str:
    return f"{silence.seconds:.0f} s (limit {silence.limit:.0f} s)"


def _waits_for_data(snapshots: Sequence[RankSnapshot]) -> bool:
    """Whether the first rank's stack is in the feed, or its heartbeat says that it waits for data.

    A rank without a heartbeat is passed over.
    """
    location = snapshots[0].location
    if location and location.kind == "data":
        return True
    beats = [snapshot.beat for snapshot in snapshots if snapshot.beat]
    return bool(beats) and beats[0].activity == "data"


def _find_culprits(snapshots: Snapshots) -> list[int]:
    """The ranks that hold up the others; [] if that is not known.

    These are the ranks furthest behind, by step and activity; else by the number of collectives;
    else the ranks that are in no collective while others are. A rank alone is its own culprit.
    """
    behind = furthest_behind(
        {rank: snapshot.beat for rank, snapshot in snapshots.items() if snapshot.beat}
    )
    if 0 < len(behind) < len(snapshots):
        return list(behind)
    collectives = {
        rank: snapshot.collective for rank, snapshot in snapshots.items() if snapshot.collective
    }
    if collectives and len(collectives) == len(snapshots):
        numbers = {collective.number for collective in collectives.values()}
        if len(numbers) > 1:
            return [rank for rank, one in collectives.items() if one.number == min(numbers)]
        outside = [rank for rank, collective in collectives.items() if collective.ended]
        if 0 < len(outside) < len(collectives):
            return outside
    elsewhere = [
        rank
        for rank, snapshot in snapshots.items()
        if snapshot.location and snapshot.location.kind != "collective"
    ]
    if 0 < len(elsewhere) < len(snapshots):
        return elsewhere
    return list(snapshots) if len(snapshots) == 1 else []


def _describe_mismatch(snapshots: Snapshots) -> str:
    """Ranks that wait in different collectives of the same number, in words; '' if none do."""
    waiting = {
        rank: collective
        for rank, snapshot in snapshots.items()
        if (collective := snapshot.waits_in)
    }
    numbers = {collective.number for collective in waiting.values()}
    kinds = {(collective.name, collective.sizes) for collective in waiting.values()}
    if len(waiting) < len(snapshots) or len(numbers) != 1 or len(kinds) < 2:
        return ""
    return "; ".join(
        f"rank {rank} in {collective.name} number {collective.number} of {collective.sizes}"
        for rank, collective in sorted(waiting.items())
    )


def describe_all(snapshots: Snapshots, unit: str) -> str:
    """Where each rank is, in words; ranks in the same place are named together."""
    ranks_at: dict[str, list[int]] = {}
    for rank, snapshot in sorted(snapshots.items()):
        ranks_at.setdefault(_describe_place(snapshot, unit), []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} {place}" for place, ranks in ranks_at.items())


def _describe_place(snapshot: RankSnapshot, unit: str) -> str:
    since = ""
    if snapshot.beat and unit == "step":
        since = f" ({snapshot.beat.activity}, since step {snapshot.beat.step})"
    elif snapshot.beat:
        since = f" (since {unit} {snapshot.beat.step})"
    if snapshot.is_stopped:
        return f"stopped{since}"
    if collective := snapshot.waits_in:
        return f"in {collective.name}{since}"
    if snapshot.location:
        return f"in {snapshot.location.text}{since}"
    return f"without an answer{since}"


def name_ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names)}"
