"""The files that come with the program: the directories models/ and examples/, and the schema of
their configs, which the configs name for editors.

A wheel holds a copy of them inside the package; a checkout has them at its root.
"""

from pathlib import Path

from samecurve.errors import UserError

DIRECTORIES = ("models", "examples")
SCHEMA = Path("docs/config.schema.json")


def shipped_root() -> Path:
    """The directory in which models/, examples/ and docs/ lie."""
    inside = Path(__file__).resolve().parents[2] / "shipped"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[4]


def shipped_files() -> list[Path]:
    """All the files, relative to shipped_root(), in the order of their names.

    Files and directories that a run or an editor leaves there (`runs`, `__pycache__`, names that
    begin with a dot) are none of them.
    """
    root = shipped_root()
    files = [
        path.relative_to(root)
        for name in DIRECTORIES
        for path in (root / name).rglob("*")
        if path.is_file() and not _is_left_over(path.relative_to(root))
    ]
    return sorted([*files, SCHEMA])


def is_shipped(path: Path) -> bool:
    """Whether a relative path names a file of models/ or examples/."""
    return path.parts[:1] in {(name,) for name in DIRECTORIES} and (
        ".." not in path.parts and (shipped_root() / path).is_file()
    )


def write_shipped(directory: Path) -> int:
    """Write the files below a directory; return how many were written.

    Files that are there with the same content are kept.

    UserError: a file is there with another content, in which case nothing is written; or the
    directory can't be written.
    """
    root, missing = shipped_root(), []
    try:
        for path in shipped_files():
            there = directory / path
            if not there.exists():
                missing.append(path)
            elif there.read_bytes() != (root / path).read_bytes():
                raise UserError(
                    f"{there} is there and differs from the file that came with this version",
                    "name another directory: samecurve examples DIR",
                    "DIR",
                )
        for path in missing:
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes((root / path).read_bytes())
    except OSError as error:
        raise UserError(
            f"{error.filename or directory}: {error.strerror}",
            "name a directory that you may write: samecurve examples DIR",
            "DIR",
        ) from None
    return len(missing)


def _is_left_over(path: Path) -> bool:
    return any(part in {"runs", "__pycache__"} or part.startswith(".") for part in path.parts)
