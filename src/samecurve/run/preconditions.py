"""Preconditions of a run: a config that this machine can do, whatever the model and the data; a
writable directory, room on the disk, a free port, trackers.

UserError: one of them is not met.
"""

import json
import os
import re
import resource
import shutil
import socket
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.checkpoint import MANIFEST
from samecurve.checkpoint.store import checkpoints
from samecurve.core.config.sections import Config, Track
from samecurve.core.planning.batch import choose_batch
from samecurve.core.planning.capacity import Capacity
from samecurve.core.planning.compute import (
    check_precision,
    check_threads,
    choose_precision,
)
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import Fit, Layout, choose_layout, choose_strategy
from samecurve.core.planning.machine import Machine, choose_devices
from samecurve.core.planning.optimizer import check_engine_has, itemsize, optimizer_state
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.schedule import check_steps, choose_peak
from samecurve.core.system import read_file_bytes
from samecurve.errors import Refusals, UserError
from samecurve.run.directory import (
    SCRATCH,
    SUBMITTED,
    Lock,
    Run,
    is_live,
    is_own_lock,
    unwritable,
)
from samecurve.tasks.user_class import SOURCE_INDEX, SOURCES, TASK_PICKLE
from samecurve.units import show_bytes

if TYPE_CHECKING:  # imported by runs that ask for the same bits
    from samecurve.core.planning.same_bits import SameBits


# files that the first rank has open at least, and more of them for each rank: counted with Gloo
_FILES, _FILES_OF_RANK = 24, 2
_WRITABLE = ".writable-"  # a file that is made to see whether that is possible
# What a start writes before plan.json. The next start writes the first ones anew: its own config
# may lie there. It removes the others, since it may have no base, no first weights and no store.
_KEPT = {"lock", "checkpoints", "logs", "config.yaml", TASK_PICKLE}
_WHOLE = r"(plan|base|remote|results)\.json"
_SCRATCH_FILE = re.compile(
    rf"(config\.yaml|journal|{re.escape(TASK_PICKLE)}|{SOURCES}|{_WHOLE}\.\d+\.[0-9a-f]+)\.part"
)
_KEYS = {"base.json": {"path", "files"}, "remote.json": {"url", "copy"}}
_MOST_JSON = 1 << 24  # bytes of either
_WEIGHTS = re.compile(rf"weights-\d{{5}}\.safetensors|{re.escape(MANIFEST)}")


def check_port(port: int) -> None:
    """UserError: another program uses this port. 0: any free one."""
    with socket.socket() as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("", port))
        except OSError as error:
            raise UserError(
                f"port {port}: {error.strerror}", "--port 0 takes any free one", "--port"
            ) from None


def check_open_files(ranks: int) -> None:
    """UserError: a process may open so few files that the ranks of this machine wait for ever.

    A rank whose connections can't be opened is not told so: torch's store tries again and again.
    """
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES + _FILES_OF_RANK * ranks
    if ranks > 1 and limit != resource.RLIM_INFINITY and limit < needed:
        raise UserError(
            f"a process may open {limit} files here (`ulimit -n`); the first of {ranks} ranks opens"
            f" {needed} and more",
            "run `ulimit -n 4096` in this shell before the start, or start on one device",
            "--devices",
        )


def checkpoint_bytes(config: Config, facts: Facts) -> int:
    """Bytes of a checkpoint: weights, what features keep of them, and the optimizer's state."""
    numbers = facts.trainable if facts.model.frozen_base else facts.params
    for row in config.named_features:
        numbers += sum(row.load().numbers_kept(config, facts).values())
    precision = config.train.precision
    state = optimizer_state(config.optimizer, precision, facts)
    return itemsize(precision) * numbers + state.bytes


def most_checkpoints(plan: Plan) -> int:
    """The most checkpoints on the disk at the same time: the newest, the best, and a new one.

    A new checkpoint is published before an older one is removed.
    """
    if plan.every.save_seconds:
        return (plan.keep or 1) + 1
    gaps = [plan.every.save] if plan.every.save else []
    evaluates = bool(plan.data.eval_samples and plan.every.evaluate)
    if gaps and evaluates:  # an evaluation that is better than all before is saved too
        gaps.append(plan.every.evaluate)
    saves = 1 + sum(plan.steps // gap for gap in gaps)
    return min(plan.keep + evaluates + 1, saves) if plan.keep else saves


def without_room_for_saves(run: Run, size: int, plan: Plan) -> tuple[Plan, str | None]:
    """The plan, without saves by the clock where the disk has room for too few checkpoints.

    Also returns the line for the user; None: there is room.
    """
    most = most_checkpoints(plan)
    if not plan.every.save_seconds or _room(run)[1] >= _needed(run, size, most):
        return plan, None
    every = replace(plan.every, save_seconds=0.0)
    reasons = {name: reason for name, reason in plan.reasons.items() if name != "save"}
    line = (
        f"saved at the end only: the disk has no room for {most} checkpoints of {show_bytes(size)}"
        " at once; --max-checkpoints 1 needs room for 2, --set train.save_every=N saves every N"
        " steps"
    )
    return replace(plan, every=every, reasons=reasons), line


def _room(run: Run) -> tuple[Path, int]:
    """The directory on whose disk the run lies, or will lie, and the bytes that are free there."""
    home = run.home.absolute()
    place = next(path for path in (home, *home.parents) if path.is_dir())
    return place, shutil.disk_usage(place).free


def _needed(run: Run, size: int, most: int) -> int:
    """Bytes of the checkpoints that are still to come. size, most: as check_room()"""
    return max(most - len(checkpoints(run.checkpoints)), 1) * size


def check_room(run: Run, size: int, most: int) -> None:
    """UserError: the disk has no room for the run's checkpoints; some may be there already.

    size: bytes of one checkpoint
    most: checkpoints on the disk at the same time
    """
    place, free = _room(run)
    if free >= _needed(run, size, most):
        return
    present = checkpoints(run.checkpoints)
    there = f", of which {len(present)} are there" if present else ""
    raise UserError(
        f"{show_bytes(free)} are free at {place}; a checkpoint needs {show_bytes(size)}, and up to"
        f" {most} lie there at once{there}: those that are kept, the best, and a new one before an"
        " old one goes",
        "free some space, --max-checkpoints N (train.keep) keeps fewer, or another --save-dir",
        "--save-dir",
    )


def remove_unbegun(home: Path) -> None:
    """Remove what was made for a run that did not begin."""
    run = Run(home)
    if run.exists():
        return
    remove_cut_off(run)
    run.task.unlink(missing_ok=True)
    shutil.rmtree(home / SCRATCH, ignore_errors=True)
    for directory in (run.checkpoints, run.logs):
        with suppress(OSError):  # something lies in it
            directory.rmdir()
    if [path.name for path in home.iterdir()] == ["lock"]:
        (home / "lock").unlink()
        home.rmdir()


def remove_cut_off(run: Run) -> None:
    """Remove what a start that ended before plan.json has left, and the next may not need."""
    for path in list(run.home.iterdir()):
        if _is_cut_off(run, path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is_cut_off(run: Run, path: Path) -> bool:
    """Whether a start that ended before plan.json has left this, not somebody else's program."""
    if path == run.initial:
        return path.is_dir() and all(_WEIGHTS.fullmatch(file.name) for file in path.iterdir())
    if path.name == SOURCES:
        return (path / SOURCE_INDEX).is_file()
    if path.name in _KEYS:
        with suppress(OSError, ValueError, RecursionError, TypeError):
            return set(json.loads(read_file_bytes(path, _MOST_JSON))) == _KEYS[path.name]
        return False
    return bool(_SCRATCH_FILE.fullmatch(path.name))


def remove_refused(run: Run) -> None:
    """Remove the files of a run that was refused before its first step; other files stay."""
    for path in (run.plan, run.config, run.journal, run.control):
        path.unlink(missing_ok=True)
    for directory in (run.checkpoints, run.logs, run.assets):
        shutil.rmtree(directory, ignore_errors=True)
    remove_unbegun(run.home)


def make_home(home: Path) -> None:
    """Make a run's directory. UserError: it can't be written, or holds something else."""
    run = Run(home)
    if home.is_dir() and is_live(run):
        Lock(run).release()  # refuses what another start is just making
    if home.is_dir() and not run.exists():
        _check_unbegun(run)
    try:
        home.mkdir(parents=True, exist_ok=True)
        scratch = home / f"{_WRITABLE}{os.getpid()}"
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise unwritable(error, home) from None


def _check_unbegun(run: Run) -> None:
    """UserError: a directory without plan.json holds more than a start that was cut off leaves."""
    if checkpoints(run.checkpoints):
        raise UserError(
            f"{run.home} has lost its plan.json",
            "--resume CHECKPOINT (of its checkpoints) with another --save-dir goes on from there",
            "--save-dir",
        )
    if run.journal.exists():
        raise UserError(
            f"{run.home} has lost its plan.json, and has no checkpoint to go on from",
            "another --save-dir; or remove the directory, and the same command begins anew",
            "--save-dir",
        )
    names = {path.name for path in run.home.iterdir() if not path.name.startswith(_WRITABLE)}
    if is_own_lock(run):  # a start has found the directory empty, and has begun here
        names = {name for name in names - _KEPT if not _is_cut_off(run, run.home / name)}
    names -= {SCRATCH, SUBMITTED}
    if names:
        raise UserError(
            f"{run.home} is neither empty nor a run directory: it holds {min(names)}",
            "another --save-dir",
            "--save-dir",
        )


def check_trackers(track: Track) -> None:
    """UserError: a tracker is not installed, or its project's name is not allowed."""
    for name in track.others:
        _check_is_tracker(name)
    for name in trackers_wanted(track.model_copy(update={"others": []})):
        spec = find_spec(name)
        # a folder of that name (wandb makes one here) is not the library
        if spec is None or spec.origin is None:
            from samecurve.core.system.installation import install_command

            raise UserError(
                f"track.{name} needs {name}: not installed",
                f"{install_command(name)}, or leave it out",
                f"track.{name}",
            )
    for key, name, is_used in (
        ("track.wandb_project", track.wandb_project, track.wandb != "off"),
        ("track.experiment", track.experiment, track.mlflow or track.trackio),
    ):
        if (is_used and not 0 < len(name) <= 128) or set(name) & set("/\\#?%:"):
            raise UserError(
                f"{key}: {name!r} is no name for a project",
                "at most 128 characters, none of them / \\ # ? % :",
                key,
            )


def _check_is_tracker(name: str) -> None:
    from samecurve.core.entry_points import find, installed

    if find("trackers", name) is None:
        raise UserError(
            f"track.others: no installed package brings a tracker {name}",
            f"install its package; here: {', '.join(sorted(installed('trackers')))}",
            "track.others",
        )


def trackers_wanted(track: Track) -> list[str]:
    """Names of the trackers that the config asks for."""
    names = {
        "tensorboard": track.tensorboard,
        "wandb": track.wandb != "off",
        "mlflow": track.mlflow,
        "trackio": track.trackio,
    }
    return [*(name for name, is_wanted in names.items() if is_wanted), *track.others]


def check_before_facts(config: Config, machine: Machine, *, can_measure: bool) -> Layout:
    """Refuse what no model and no data could make right, before either is looked at.

    Returns the layout that the run has if its model fits on one device, and the plan takes no more
    CPU ranks. What stands in the way of bits that nobody asks for is no refusal.

    can_measure: speeds of devices are measured before the run, where the config asks for them

    UserError: what the config asks for cannot be done on this machine; all that is known of it.
    """
    train, refusals = config.train, Refusals()
    layout, same_bits = None, None
    if train.asks_same_bits:
        from samecurve.core.planning.exact import as_asked

        same_bits = as_asked(config, machine, None)
    with refusals.collected():
        layout = _layout_before_facts(config, machine, refusals, same_bits=same_bits)
    refusals.collect(check_steps, train.steps)
    refusals.collect(check_engine_has, config.optimizer, config.engine)
    for row in config.named_features:
        refusals.collect(row.load().check, config, layout)
        if not can_measure:
            refusals.collect(row.load().check_unmeasured, config, layout)
    if same_bits:
        features = [row.load() for row in config.named_features]
        refusals.collect(same_bits.check_features, features)
    refusals.raise_any()
    assert layout is not None, "else it was refused"
    return layout


def _layout_before_facts(
    config: Config, machine: Machine, refusals: Refusals, *, same_bits: "SameBits | None"
) -> Layout:
    """The layout, with what follows from it. refusals: takes those that don't hinder each other."""
    engine, train = config.engine, config.train
    devices = choose_devices(config.devices, engine, machine).value
    precision = choose_precision(train, engine, devices).value
    strategy = choose_strategy(
        config.devices, engine, devices, fits=lambda _spec, _shards: Fit(True)
    )
    layout = choose_layout(
        config.devices,
        strategy,
        devices,
        machine,
        syncs_norms=False,
        fixed_microbatches=same_bits is not None,
    ).value
    with refusals.collected():
        if same_bits is None:
            split = choose_batch(config.batch, None, Capacity(), layout.num_devices).value
        else:
            refusals.collect(same_bits.check_layout, layout)
            split = same_bits.split(layout.num_devices, layout.interleaved).value
        size = split.global_batch_size
        choose_peak(config.schedule, config.optimizer.lr, config.batch, size)
    refusals.collect(check_threads, config.devices, layout)
    refusals.collect(check_precision, precision, layout)
    return layout
