"""The frozen base of a run that trains something small on it: weights that stay where they are.

The run keeps the path and the SHA-256 of each file (base.json), not the weights. A base that has
changed is refused before anything is trained or made with it.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.system import read_file_bytes
from samecurve.errors import RunError, UserError
from samecurve.run.directory import Run
from samecurve.run.resume import Origin
from samecurve.run.weights.foreign_weights import WHERE
from samecurve.run.weights.initial_weights import placed, read_initial_weights
from samecurve.run.weights.opened_checkpoint import open_checkpoint
from samecurve.units import first_and_count

_MOST_JSON = 1 << 24  # bytes of base.json
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")


@dataclass(frozen=True)
class Base:
    """The files of a frozen base, and what they held when the run began."""

    path: str  # absolute: a file of weights, or a directory with some
    files: Mapping[str, str]  # SHA-256 by name: the weights, and the config beside them

    @classmethod
    def of(cls, path: Path) -> "Base":
        """The base at this path, as its files are now."""
        path = path.resolve()
        files = [path]
        if path.is_dir():
            of_base = (*_WEIGHTS, "/config.json")
            files = sorted(f for f in path.iterdir() if str(f).endswith(of_base) and f.is_file())
        with ThreadPoolExecutor() as pool:
            hashes = dict(zip([f.name for f in files], pool.map(_sha256, files), strict=True))
        return cls(str(path), hashes)

    @classmethod
    def kept_by(cls, run: Run) -> "Base | None":
        """The base that a run began on; None: it has no base. RunError: base.json is damaged."""
        if not run.base.is_file():
            return None
        try:
            values = json.loads(read_file_bytes(run.base, _MOST_JSON))
            return cls(str(values["path"]), {str(k): str(v) for k, v in values["files"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(
                f"{run.base} can't be read: {error}", "put the file back", str(run.base)
            ) from None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check_unchanged(self) -> None:
        """Compare the files with what they were at first. UserError: they changed or are gone."""
        _refuse_other(self, Base.of(Path(self.path)) if Path(self.path).exists() else None)


def choose_base(
    origin: Origin, init_from: Path | None, config: Config, facts: Facts
) -> Base | None:
    """The base of a task that has a frozen one; None: the base's values follow from the seed.

    origin: what the run goes on from; what the user should know is added to its notes
    init_from: --init-from, or what the config's model begins from

    UserError: the weights don't fit the model, or are not those that the run began with.
    """
    before = _base_before(origin)
    path = init_from or (Path(before.path) if before else None)
    if path is None:
        return None
    if before and not path.exists():
        _refuse_other(before, None)
    if Run(path).exists():  # of a run, the weights lie in its newest checkpoint
        is_same_run = before is not None and Path(before.path).parent.parent == path.resolve()
        path = Path(before.path) if before and is_same_run else open_checkpoint(path, WHERE).path
    with placed(config, path):
        source = read_initial_weights(path, config, facts)
    now = Base.of(path)
    if not now.files:
        raise UserError(
            f"{path} has no files of weights of its own",
            "a directory as save_pretrained() or `samecurve export` writes it",
            "model",
        )
    if before:
        _refuse_other(before, now)
    elif origin.run or origin.checkpoint:
        raise UserError(
            f"this run began with a base of the seed's own values, not with {path}",
            "leave --init-from out to go on with it, or another --save-dir",
            "--init-from",
        )
    else:
        origin.notes.extend(source.notes)
    return now


def _base_before(origin: Origin) -> Base | None:
    if origin.run is not None and (base := Base.kept_by(origin.run)):
        return base
    return Base.kept_by(Run(origin.checkpoint.parent.parent)) if origin.checkpoint else None


def _refuse_other(before: Base, now: Base | None) -> None:
    """Compare two states of a base. now: None: the files are gone. UserError: they differ."""
    remedy = "the files as they were, or a new run with another --save-dir"
    if now is None:
        raise UserError(
            f"the base of this run, {before.path}, is not there any more", remedy, before.path
        )
    names = sorted({*before.files, *now.files})
    changed = [name for name in names if before.files.get(name) != now.files.get(name)]
    if changed:
        first = changed[0]
        was, has = (base.files.get(first, "none")[:16] for base in (before, now))
        raise UserError(
            f"{now.path} is not the base that this run began with: {first_and_count(changed)}"
            f" changed (SHA-256 of {first} {was}, now {has})",
            remedy,
            now.path,
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
