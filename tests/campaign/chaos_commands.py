"""Faults after which the same command is given again: of the launcher, of the data."""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from chaos_jobs import SAVE, ChaosError, Ended, Job, Lab, Outcome, require
from chaos_rows import write_features
from planted import Plant

from samecurve.core.events import Beat
from samecurve.errors import START_AGAIN
from samecurve.observe import read_beat

_PHASES = ("start", "step", "save", "evaluate")


def trial(job: Job, whats: Sequence[str], run: Callable[[], None]) -> list[Outcome]:
    """The outcomes of a job with these faults; all are lost where the job is not as it should be.

    run: adds an outcome to the job for each fault.
    """
    try:
        run()
        job.check_no_orphans()
        require(len(job.outcomes) == len(whats), "a fault has not happened")
    except ChaosError as error:
        return [Outcome(job.kind, what, recovered=False, note=str(error)) for what in whats]
    return job.outcomes


# the launcher


def kill_launchers(lab: Lab, count: int) -> list[Outcome]:
    """kill -9 of the launcher; its ranks go with it."""
    cases = [(signal.SIGKILL, _PHASES[number % len(_PHASES)]) for number in range(count)]
    return end_launchers(lab, "kill -9 of the launcher", cases)


def signal_launchers(lab: Lab) -> list[Outcome]:
    """SIGTERM and SIGINT at bad moments: the run saves, leaves, and loses no step."""
    cases = [(number, phase) for phase in _PHASES for number in (signal.SIGTERM, signal.SIGINT)]
    return end_launchers(lab, "SIGTERM and SIGINT to the launcher", cases)


def end_launchers(
    lab: Lab, kind: str, cases: Sequence[tuple[signal.Signals, str]]
) -> list[Outcome]:
    """The launcher gets a signal in a phase; the same command is given again."""
    job = lab.job(kind, (len(cases) + 2) * 3 * SAVE)
    whats = [f"{number.name}, in the phase {phase}" for number, phase in cases]

    def run() -> None:
        ends: list[tuple[float, int, int]] = []  # when, lines of the journal, steps lost
        for number, phase in cases:
            with job.live() as live:
                _wait_for(job, live.until, phase)
                sent = time.time()
                live.process.send_signal(number)
                ended = live.end()
            job.check_no_orphans()
            lost = _lost(read_beat(job.run / "logs/heartbeat-0"), job.last_saved())
            if number != signal.SIGKILL:
                require(ended.code == 128 + number, f"exit {ended.code}: {ended.text[-500:]}")
                require(lost == 0, f"{lost} steps lost by a stop in order")
            ends.append((sent, len(job.lines()), lost))
        job.finish()
        job.check_undamaged()
        job.check_equal(lab.unfailed(job.steps))
        bounds = [*(line for _, line, _ in ends[1:]), len(job.lines())]
        for what, (sent, line, lost), bound in zip(whats, ends, bounds, strict=True):
            # None: the next signal came before a step
            seconds = job.seconds_after(sent, line) if _has_step(job, line, bound) else None
            job.add(what, lost, seconds)

    return trial(job, whats, run)


def _wait_for(job: Job, until: Callable[[Callable[[], object]], None], phase: str) -> None:
    """Wait until this start is in a phase, some steps after its beginning."""
    began = job.steps_done()

    def is_there() -> bool:
        if not job.ranks():
            return False
        if phase == "start":
            return True
        beat = read_beat(job.run / "logs/heartbeat-0")
        if beat is None:
            return False
        # a short phase may be missed, the fault may not
        return beat.step > began + 2 and (
            beat.activity == phase or beat.step > began + 2 * SAVE + 2
        )

    until(is_there)


def _has_step(job: Job, since: int, before: int | None = None) -> bool:
    return any(event.kind == "step" for event in job.lines()[since:before])


def _has_saved(job: Job, before: int) -> bool:
    return job.last_saved() > before


def _lost(beat: Beat | None, saved: int) -> int:
    """The steps that will be trained again. ChaosError: more than a fault may cost."""
    done = max(beat.step, 0) if beat else 0
    may_wait = beat is not None and beat.activity in {"evaluate", "save"}  # for the save before
    begun = (done - may_wait) // SAVE * SAVE  # the newest save that had surely begun
    require(begun - saved <= SAVE, f"{begun - saved} steps before the newest save begun")
    return max(done - saved, 0)


def kill_ranks_at_any_moment(lab: Lab, count: int) -> list[Outcome]:
    """kill -9 of a rank from outside, at random moments."""
    job = lab.job("kill -9 of a rank, at a random moment", count * 3 * SAVE, restarts=count)
    chance = lab.chance("ranks")
    whats = [f"rank {chance.randrange(2)}" for _ in range(count)]

    def run() -> None:
        killed: list[tuple[float, int]] = []
        with job.live() as live:
            for number, what in enumerate(whats):
                lines, saved = len(job.lines()), job.last_saved()
                live.until(partial(_has_step, job, lines))
                if number % 2:  # else the run is given up, as one that gets nowhere
                    live.until(partial(_has_saved, job, saved))
                time.sleep(chance.uniform(0, 0.3))
                pids = job.ranks()
                require(int(what[-1]) in pids, f"no such rank among {pids}")
                killed.append((time.time(), _done(job)))
                os.kill(pids[int(what[-1])], signal.SIGKILL)
                live.until(lambda: len(_restarts(job)) >= len(killed))
            ended = live.end()
        require(ended.code == 0, f"exit code {ended.code}: {ended.text[-1500:]}")
        job.check_undamaged()
        job.check_equal(lab.unfailed(job.steps))
        for what, (moment, done), line in zip(whats, killed, _restarts(job), strict=True):
            event = job.lines()[line]
            require("was ended by SIGKILL" in event.values["cause"], event.values["cause"])
            lost = done - event.step
            require(done // SAVE * SAVE - event.step <= SAVE, f"{lost} steps lost")
            job.add(what, max(lost, 0), job.seconds_after(moment, line))

    return trial(job, whats, run)


def _done(job: Job) -> int:
    beat = read_beat(job.run / "logs/heartbeat-0")
    return beat.step if beat else 0


def _restarts(job: Job) -> list[int]:
    return [number for number, event in enumerate(job.lines()) if event.kind == "restarted"]


def run_twice(lab: Lab) -> list[Outcome]:
    """A second command in the directory of a live run is refused, and disturbs nothing."""
    job = lab.job("two runs in one directory", 600)
    whats = ["the same command", "on other devices", "both at once in a new directory"]

    def second(*flags: object) -> None:
        other = job.beside()
        ended = other.train(*flags)
        require(ended.code == 2, f"exit code {ended.code}: {ended.text}")
        require("belongs to a live run" in ended.text, ended.text)

    def run() -> None:
        with job.live() as live:
            live.until(lambda: job.steps_done() > 3)
            for what, flags in zip(whats, ((), ("--devices", "cpu")), strict=False):
                second(*flags)
                job.add(what, 0, None)
            ended = live.end()
        require(ended.code == 0, ended.text[-1500:])
        job.check_equal(lab.unfailed(job.steps))
        both = lab.job(job.kind, 100)
        rival = both.beside()
        with both.live() as one, rival.live() as other:
            codes = sorted(each.end().code for each in (one, other))
        require(codes == [0, 2], f"exit codes {codes}")
        both.check_no_orphans()
        both.check_equal(lab.unfailed(both.steps))
        job.add(whats[2], 0, None)

    return trial(job, whats, run)


# what a rank plants, and the user mends


def commands_again(
    job: Job,
    plants: Sequence[Plant],
    says: str,
    mend: Callable[[], object] = lambda: None,
    *,
    unfailed: Path,
    code: int = 1,
) -> list[Outcome]:
    """Each fault ends the command with a cause; somebody mends it, and gives the command again.

    code: the exit code of the command that failed
    """
    whats = [f"{plant.how} of rank {plant.rank}, {plant.where}" for plant in plants]

    def run() -> None:
        for number, what in enumerate(whats):
            job.plant(plants[: number + 1])
            ended = job.train()
            check_failed(job, ended, says, code)
            fired = job.fired(number)
            require(fired is not None, "it did not happen")
            assert fired is not None
            mend()
            saved, lines = job.last_saved(), len(job.lines())
            require(fired.saving - saved <= SAVE, f"saved {saved} of {fired.step} steps")
            with job.live() as live:
                live.until(partial(_has_step, job, lines))
                job.add(what, max(fired.step - saved, 0), job.seconds_after(fired.time, lines))
                if number + 1 < len(whats):
                    live.process.send_signal(signal.SIGTERM)
                live.end()
        job.finish()
        job.check_equal(unfailed)

    return trial(job, whats, run)


def check_failed(job: Job, ended: Ended, says: str, code: int = 1) -> None:
    """ChaosError: the command has not failed with this exit code, or does not say why, once."""
    require(ended.code == code, f"exit code {ended.code}: {ended.text[-1500:]}")
    errors = [line for line in ended.text.splitlines() if line.startswith("error: ")]
    require(len(errors) == 1 and bool(re.search(says, errors[0])), f"said: {ended.text[-1500:]}")
    job.check_no_orphans()


def spoil_batches(lab: Lab) -> list[Outcome]:
    """A batch that gives a NaN on one rank, under both policies."""
    kind, steps = "a NaN on one rank", 40
    job = lab.job(kind, steps)
    plants = [Plant("data", rank, 12 + 6 * rank, "nan") for rank in (0, 1)]
    stopped = commands_again(job, plants, "not finite", unfailed=lab.unfailed(steps))
    data, skip = "{nan: 17}", ("--set", "train.non_finite=skip")
    skipping = lab.job(kind, steps, data=data)
    whats = ["skipped, in every epoch"]

    def run() -> None:
        skipping.finish(*skip)
        skipped = [e.step for e in skipping.lines() if e.values.get("skipped") is True]
        require(len(skipped) >= 3, f"skipped: {skipped}")
        skipping.check_equal(lab.unfailed(steps, data, *skip))
        skipping.add(whats[0], 0, None)

    return [*stopped, *trial(skipping, whats, run)]


def cut_data(lab: Lab) -> list[Outcome]:
    """The data's file is cut while the run trains; it is put back."""
    kind, steps = "a data file cut while training", 40
    outcomes = []
    for mapped, code, says in (
        ("false", 1, r"chaos_task\.py:\d+: the data of Task\.train_data\(\): ValueError"),
        ("true", START_AGAIN, r"was ended by SIGBUS: a file that it had mapped lost its room"),
    ):
        job = lab.job(kind, steps, data=f"{{file: rows.bin, mapped: {mapped}}}")
        rows = job.home / "rows.bin"
        write_features(rows)
        plants = [Plant("updated", rank, 12 + 6 * rank, "cut_data") for rank in (0, 1)]
        outcomes += commands_again(
            job,
            plants,
            says,
            partial(write_features, rows),
            unfailed=lab.unfailed(steps),
            code=code,
        )
    return outcomes


def crash_again_and_again(lab: Lab) -> list[Outcome]:
    """A rank that dies at the same step in every start is given up after three fruitless starts."""
    outcomes = []
    for where, rank in (("update", 0), ("shard", 1)):
        job = lab.job("a crash at the same step every time", 30, restarts=20)
        what = f"rank {rank}, {where}"

        def run(job: Job = job, what: str = what, where: str = where, rank: int = rank) -> None:
            job.plant([Plant(where, rank, 12, always=True)])
            ended = job.train()
            check_failed(job, ended, f"rank {rank} was ended by SIGKILL")
            fired = job.fired(0)
            assert fired is not None
            require("3 starts in a row failed before another save" in ended.text, ended.text)
            require(len(_restarts(job)) == 3, f"{len(_restarts(job))} new starts")
            lost, lines = fired.step - job.last_saved(), len(job.lines())
            require(fired.saving - job.last_saved() <= SAVE, f"{lost} steps lost")
            job.plant([])
            job.finish()
            job.check_equal(lab.unfailed(job.steps))
            job.add(what, lost, job.seconds_after(fired.time, lines))

        outcomes += trial(job, [what], run)
    return outcomes


def jump_clocks(lab: Lab) -> list[Outcome]:
    """The clock of a rank, or of the launcher, jumps by a day; then a rank is killed, too."""
    job = lab.job("a clock that jumps by a day", 60, restarts=4)
    day = 86_400.0
    jumps = [
        Plant("data", number % 2, 6 + 12 * number, "clock", sign * day)
        for number, sign in enumerate((1, 1, -1, -1))
    ]
    kills = [Plant("forward", 0, jump.step + 6) for jump in jumps]
    job.plant([plant for pair in zip(jumps, kills, strict=True) for plant in pair])
    whats = [f"rank {jump.rank}, {jump.value / 3600:+g} h, then killed" for jump in jumps]

    def run() -> None:
        job.finish()
        job.check_undamaged()
        job.check_equal(lab.unfailed(job.steps))
        restarts = _restarts(job)
        require(len(restarts) == len(jumps), f"{len(restarts)} new starts")
        for number, (what, line) in enumerate(zip(whats, restarts, strict=True)):
            fired = job.fired(2 * number + 1)
            assert fired is not None
            resumed = job.lines()[line].step
            require(fired.saving - resumed <= SAVE, f"{fired.step - resumed} steps lost")
            job.add(what, fired.step - resumed, job.seconds_after(fired.time, line))

    return trial(job, whats, run)


def slow_ranks(lab: Lab) -> list[Outcome]:
    """A rank that takes several times as long: nothing stops, and the journal names it."""
    outcomes = []
    for rank in (0, 1):
        job = lab.job("a slow rank", 80)
        job.plant([Plant("data", rank, 30, "slow", 0.1)])
        what = f"rank {rank}, 0.1 s a step more"

        def run(job: Job = job, what: str = what, rank: int = rank) -> None:
            job.finish()
            job.check_equal(lab.unfailed(job.steps))
            slow = [event.values for event in job.lines() if event.kind == "slow"]
            require(any(line.get("rank") == rank for line in slow), f"said: {slow}")
            job.add(what, 0, None)

        outcomes += trial(job, [what], run)
    return outcomes
