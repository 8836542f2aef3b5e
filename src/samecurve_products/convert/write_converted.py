"""Write another tool's config as one of ours.

Comments above the new config say what became of each field; what our config still refuses is
returned as errors.
"""

from collections.abc import Callable
from pathlib import Path

from samecurve.core.system import write_new
from samecurve.seam import Document, Tasks, UserError, load_document, read_document
from samecurve_products.convert.converted_config import ConvertedConfig
from samecurve_products.convert.tools import SHAPES
from samecurve_products.convert.tools import convert as read


def convert(
    old: Path, new: Path, set_flags: Callable[[Document], object]
) -> tuple[ConvertedConfig, list[UserError]]:
    """Convert `old` and write `new`.

    set_flags: sets in the converted document what flags say
    Returns what became of each field, and the errors for which our loader refuses the new config;
    the file is written all the same. UserError: nothing could be read or written.
    """
    if new.suffix not in {".yaml", ".yml"}:
        raise UserError(
            f"--to {new}: the config is written as YAML", "a name that ends in .yaml", "--to"
        )
    document = read_document(old)
    converted = read(document, old.parent)
    if converted is None:
        known = "; ".join(f"{tool} by {shape}" for tool, shape in SHAPES.items())
        raise UserError(
            f"{old} is no config that can be converted",
            f"one of Samecurve needs no converting: samecurve plan -f {old}. Others are told by"
            f" their shape: {known}",
            str(old),
        )
    set_flags(converted.document)
    converted = converted.after_flags()
    errors = converted.unresolved(converted.document)
    try:
        load_document(converted.document, Tasks())
    except UserError as error:
        errors.append(error)
    _write(new, converted.to_yaml(old.name))
    return converted, errors


def _write(path: Path, text: str) -> None:
    """Write a new file, whole or not at all; a file that exists is never replaced."""
    try:
        write_new(path, text.encode())
    except FileExistsError:
        raise UserError(f"{path} exists", "another name, or remove it first", "--to") from None
    except OSError as error:
        raise UserError(
            f"{path} can't be written: {error.strerror}",
            "a directory that exists and takes files",
            "--to",
        ) from None
