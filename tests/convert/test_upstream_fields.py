"""Every field that another trainer knows is read, left out with its reason, or refused with its own
reason: none is unknown.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from diffusion_configs import read_values
from test_convert_onetrainer import SDXL

from samecurve.core.config.document import read_document

FIELDS = read_document(Path(__file__).with_name("upstream_fields.yaml")).value
UNKNOWN = "is a field that this program does not know"


def nested(sections: dict[str, str]) -> dict[str, Any]:
    """A config with each field; the value of each is 1."""
    config: dict[str, Any] = {}
    for section, names in sorted(sections.items()):
        at: Any = config
        for part in section.split(".") if section else []:
            at = at.setdefault(part, {})
        at |= dict.fromkeys(names.split(), 1)
    lists: dict[str, Any] = with_lists(config)
    return lists


def with_lists(value: Any) -> Any:
    """The value with a list in place of each mapping of numbers."""
    if not isinstance(value, dict):
        return value
    items = {name: with_lists(item) for name, item in value.items()}
    return list(items.values()) if items.keys() == {"0"} else items


def config_of(tool: str) -> dict[str, Any]:
    values = nested(FIELDS[tool])
    if tool == "ai-toolkit":
        return {"job": "extension", "config": {"name": "a", "process": [values]}}
    words = {"output_dir": "out", "workspace_dir": "out"}
    return {**values, **{name: word for name, word in words.items() if name in values}}


@pytest.mark.parametrize("tool", FIELDS)
def test_no_field_is_unknown(tool: str) -> None:
    converted = read_values(config_of(tool))
    assert converted.tool == tool
    unknown = [row.field for row in converted.readings if row.explanation == UNKNOWN]
    assert unknown == []
    names = [row.field for row in converted.readings if not row.field.startswith("(")]
    assert len(names) == len(set(names)) >= sum(len(text.split()) for text in FIELDS[tool].values())


def test_a_field_of_another_version_is_named() -> None:
    for tool, section in (
        ("OneTrainer", "concepts.0.text"),
        ("OneTrainer", "unet"),
        ("kohya", "datasets.0.subsets.0"),
        ("ai-toolkit", "train"),
        ("ai-toolkit", "datasets.0"),
        ("SimpleTuner", ""),
    ):
        config = deepcopy(SDXL) if tool == "OneTrainer" else config_of(tool)
        at: Any = config["config"]["process"][0] if tool == "ai-toolkit" else config
        for part in section.split(".") if section else []:
            at = at[int(part) if part.isdigit() else part]
        at["of_next_year"] = 1
        (row,) = [row for row in read_values(config).readings if row.explanation == UNKNOWN]
        assert row.field == f"{section}.of_next_year".removeprefix(".")
