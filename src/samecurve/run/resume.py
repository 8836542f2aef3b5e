"""The origin of a run: its own newest checkpoint, another run's checkpoint, or nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.checkpoint import MANIFEST, CorruptCheckpointError, name_of, read_manifest
from samecurve.checkpoint.format import verify_checkpoint
from samecurve.checkpoint.store import checkpoints, newest, set_aside
from samecurve.core.config.loading import LoadedConfig
from samecurve.core.config.sections import Config
from samecurve.core.config.train_section import NOT_COMPARED
from samecurve.core.determinism.data_order import Anchor
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Counters
from samecurve.errors import SamecurveError, UserError
from samecurve.observe import has_finished
from samecurve.run.directory import Lock, Run, is_live
from samecurve.tasks import Tasks
from samecurve.tasks.user_class import identity_of

if TYPE_CHECKING:  # most runs have no store
    from samecurve.storage.url import ObjectUrl


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices of a command line that are not in the config."""

    save_dir: Path | None = None
    resume: str = "auto"  # auto, never, or the path of a run or checkpoint
    stop_after: int | None = None
    new_batch: bool = False
    init_from: Path | None = None
    # where --save-dir and --init-from name a place in a store, and no path
    save_url: "ObjectUrl | None" = None
    init_url: "ObjectUrl | None" = None
    group: str = ""  # names the hosts that one launcher keeps together; not a flag


@dataclass
class Origin:
    """The checkpoint, if any, with which a run begins."""

    run: Run | None = None  # the run that goes on; None: a new run
    checkpoint: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict)  # of the checkpoint
    own: bool = True  # the checkpoint lies in the run directory itself
    notes: list[str] = field(default_factory=list)  # lines for the user
    changes: list[str] = field(default_factory=list)  # of what a curve follows from, since it began

    @property
    def step(self) -> int:
        return int(self.manifest.get("step", 0))

    def has_ended(self, plan: Plan) -> bool:
        """Whether nothing is left to train: all steps are done, or the run stopped early."""
        if self.checkpoint is None:
            return False
        return self.step >= plan.steps or _stopped_early(self.manifest, plan)


def find_origin(loaded: LoadedConfig, options: Options) -> Origin:
    """The origin that --save-dir and --resume name, or that of an unfinished run of this config.

    UserError: --resume names no checkpoint, or --save-dir holds another run.
    """
    if options.save_dir:
        Run(options.save_dir).check("--save-dir")
    if options.resume not in {"auto", "never"}:
        return _from_path(Path(options.resume), options)
    if options.resume == "never":
        if options.save_dir and Run(options.save_dir).exists():
            raise UserError(
                f"{options.save_dir} holds a run already",
                "another --save-dir, or --resume auto to go on with it",
                "--resume never",
            )
        return Origin()
    if options.save_dir:
        run: Run | None = Run(options.save_dir)
    else:
        run = _unfinished(loaded, options.init_from)
    if run is None or not run.exists():
        return Origin()
    origin = _newest_of(run, options.group)
    parent = run.parent_checkpoint()
    if origin.checkpoint or parent is None:
        return origin
    return replace(_from_path(Path(parent), Options()), run=run, own=False)


def _newest_of(run: Run, group: str) -> Origin:
    Lock(run, group).release()  # refuse a live run, which removes its older checkpoints meanwhile
    checkpoint, damaged = newest(run.checkpoints)
    if checkpoint is None and damaged:
        raise UserError(
            f"{run.home} has no other checkpoint to go on from: {'; '.join(damaged)}",
            f"a copy of it in its place, in {run.checkpoints}; or another --save-dir, which begins"
            " anew",
            "--save-dir",
        )
    if checkpoint is None:
        return Origin(run)
    notes = [f"{line}; going on from {checkpoint.name}" for line in damaged]
    return Origin(run, checkpoint, read_manifest(checkpoint), notes=notes)


def _from_path(path: Path, options: Options) -> Origin:
    """The origin that --resume PATH names: a run directory, or a checkpoint in one.

    With --save-dir elsewhere, a new run begins from it.
    """
    save_dir = options.save_dir
    if Run(path).exists():
        origin = _newest_of(Run(path), options.group)
        if origin.checkpoint is None and save_dir:
            raise UserError(
                f"{path} has no checkpoint to begin from",
                "a run that has saved, or leave --resume out",
                "--resume",
            )
    elif (path / MANIFEST).is_file():
        origin = _from_checkpoint(path)
    else:
        raise UserError(
            f"{path} is neither a run directory nor a checkpoint",
            "a directory with plan.json, or one with manifest.json in it",
            "--resume",
        )
    if origin.run and (save_dir is None or save_dir.resolve() == origin.run.home.resolve()):
        return origin
    if save_dir and Run(save_dir).exists():
        return _begun_before(Run(save_dir), origin)
    return replace(origin, run=None, own=False)


def _from_checkpoint(path: Path) -> Origin:
    """The origin of a checkpoint's path. UserError: the checkpoint is damaged."""
    path = path.resolve() if path.is_symlink() else path
    run = Run(path.resolve().parent.parent)
    run.check("--resume")
    try:
        manifest = verify_checkpoint(path)
    except CorruptCheckpointError as error:
        raise UserError(
            f"checkpoint {path}: {error}",
            "another checkpoint, or the run directory, which falls back to the newest whole one",
            "--resume",
        ) from None
    if not run.exists():
        return Origin(None, path, manifest)
    return Origin(run, path, manifest)


def _begun_before(run: Run, origin: Origin) -> Origin:
    """The run that this command began earlier from another run's checkpoint, which goes on.

    UserError: the run did not begin from this checkpoint.
    """
    if run.parent_checkpoint() != str(origin.checkpoint):
        raise UserError(
            f"{run.home} holds another run already",
            "another --save-dir for the run that begins from this checkpoint",
            "--save-dir",
        )
    newer = _newest_of(run, "")
    if newer.checkpoint:
        return newer
    return replace(origin, run=run, own=False)


def _unfinished(loaded: LoadedConfig, init_from: Path | None) -> Run | None:
    """The newest unfinished run of the same config and first weights, on any devices and engine.

    The same command, typed again, goes on with this run.
    """
    settled = kept_defaults(loaded)
    wanted = _comparable(loaded.config, settled)
    weights = init_from.resolve() if init_from else None
    for home in sorted(Path("runs").glob(f"{loaded.name}-*"), reverse=True):
        run = Run(home)
        if not run.exists() or is_live(run) or _finished(run):
            continue
        if not _began_from(run, weights):
            continue
        try:
            if task_of(run) != wanted["task"]:
                continue
            config = run.read_config(Tasks())
            if _comparable(config, settled) == wanted and loaded.config.train.keeps_bits_of(
                config.train
            ):
                return run
        except SamecurveError:
            continue  # written by another version of the program
    return None


def _began_from(run: Run, weights: Path | None) -> bool:
    """Whether the run began from these weights, or from a checkpoint of the run that they are."""
    path = run.weights_path()
    if path is None or weights is None:
        return path is None and weights is None
    return weights in {Path(path), Path(path).parent.parent}


def task_of(run: Run) -> str:
    """The identity of the run's task, of which nothing is imported."""
    return identity_of(str(run.read_document().value.get("task", "language")))


def kept_defaults(loaded: LoadedConfig) -> list[str]:
    """Fields of `model` whose default was chosen here: a run that goes on keeps its own value."""
    names = loaded.config.model.kept_defaults
    return [name for name in names if f"model.{name}" not in loaded.origins]


def _comparable(config: Config, settled: Sequence[str]) -> dict[str, Any]:
    """The values of a config that decide its curve. settled: names of `model` to leave out"""
    values = config.model_dump(
        mode="json",
        exclude={
            "devices": True,
            "engine": True,
            "track": True,
            "train": NOT_COMPARED,
            "data": set(config.data.indifferent),
            "model": dict.fromkeys(settled, True),
        },
    )
    return {**values, "task": identity_of(config.task)}


def _stopped_early(manifest: Mapping[str, Any], plan: Plan) -> bool:
    return plan.ends_early(Counters.from_loop(manifest.get("loop", {})))


def _finished(run: Run) -> bool:
    """Whether the run is trained and ended: tested, and its results written."""
    try:
        plan, paths = run.read_plan(), checkpoints(run.checkpoints)
        last = name_of(plan.steps)
        for path in paths[:1]:
            manifest = read_manifest(path)
            if path.name >= last or _stopped_early(manifest, plan):
                return has_finished(run.journal, int(manifest["step"]))
        return False
    except SamecurveError:
        return True  # a run that can't be read can't go on


def fixed_of(origin: Origin, options: Options) -> Fixed | None:
    """Read what the run's first plan fixed for good. None: this is the first plan.

    UserError: --new-batch, with no checkpoint to begin from.
    """
    if origin.checkpoint is None:
        if options.new_batch:
            raise UserError(
                "there is no checkpoint whose batch could be changed",
                "leave --new-batch out",
                "--new-batch",
            )
        if origin.run is None:
            return None
        return replace(origin.run.read_plan().fixed, anchor=Anchor())
    fixed = Fixed.from_manifest(origin.manifest)
    if not options.new_batch:
        return fixed
    return replace(
        fixed,
        global_batch_size=None,
        anchor=Anchor(origin.step, origin.manifest["epoch"], origin.manifest["consumed"]),
    )


def set_later_aside(run: Run, step: int | None) -> list[str]:
    """Set aside checkpoints beyond the step from which the run goes on. Returns a line for each.

    These checkpoints are damaged, or belong to steps that are trained anew: none of them may be
    taken for the newest.

    step: of one of the run's own checkpoints; None: the run goes on from none of them
    """
    lines = []
    for path in checkpoints(run.checkpoints):
        if step is not None and path.name <= name_of(step):
            break
        aside = set_aside(path)
        lines.append(f"{path.name} lies beyond where this goes on from: set aside as {aside.name}")
    return lines
