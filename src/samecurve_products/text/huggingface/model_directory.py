"""A model's directory, as the library's save_pretrained() or `samecurve export` writes it."""

import json
from pathlib import Path
from typing import Any

from samecurve.seam import UserError

CONFIG = "config.json"
# files beside the weights, which the library reads when the model is used
BESIDE_WEIGHTS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
WRITTEN = "a directory as save_pretrained() or `samecurve export` writes it"
_ADAPTER = "adapter_config.json"


def check_directory(directory: Path) -> None:
    """UserError: the directory is missing, or holds an adapter alone."""
    if not directory.exists():
        raise UserError(
            f"there is no directory {directory}, and nothing is downloaded",
            f"{WRITTEN}, on this machine",
            "model.path",
        )
    if (directory / _ADAPTER).is_file() and not (directory / CONFIG).is_file():
        raise UserError(
            f"{directory} holds an adapter ({_ADAPTER}), and no model",
            "merge it into its base first (peft's merge_and_unload(), save_pretrained()), or name"
            " the base",
            "model.path",
        )


def read_config_file(file: Path) -> dict[str, Any]:
    """A JSON file of a model's directory. UserError: the file can't be read as one."""
    try:
        values: dict[str, Any] = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} can't be read as a model's config: {error}",
            "a directory as save_pretrained() writes it",
            str(file),
        ) from None
    return values


def classes_of_classifier(directory: Path | None) -> list[str] | None:
    """Names of a classifier's classes, in the order of their numbers; None: it is no classifier."""
    if directory is None or not (directory / CONFIG).is_file():
        return None
    config = read_config_file(directory / CONFIG)
    architectures = config.get("architectures") or []
    if not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        return None
    names = config.get("id2label") or {}
    return [str(names[number]) for number in sorted(names, key=int)]
