"""A value of a wrong type is refused at its place; no config of another trainer ends in a
traceback.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import test_convert_aitoolkit as aitoolkit
import test_convert_kohya as kohya
import test_convert_onetrainer as onetrainer
import test_convert_simpletuner as simpletuner
from diffusion_configs import read_values

from samecurve.core.config.document import parse_document
from samecurve.errors import UserError

WRONG: tuple[Any, ...] = ([], {}, "x", -1, [None], True, {"a": [1]})
TRAIN: dict[str, Any] = {}
for section in parse_document(kohya.TRAIN, "train.toml").value.values():
    TRAIN |= section
CONFIGS: dict[str, dict[str, Any]] = {
    "OneTrainer": {**onetrainer.SDXL, "model_type": "FLUX_DEV_1"},
    "ai-toolkit": {"job": "train", "config": {"process": [aitoolkit.FLUX]}},
    "kohya": {**TRAIN, **parse_document(kohya.SETS, "sets.toml").value},
    "SimpleTuner": simpletuner.CONFIG,
}


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The key of each value within mappings and lists."""
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    else:
        inner = []
    return [key for name, item in inner for key in [(*above, name), *places(item, (*above, name))]]


def with_value(value: Any, key: tuple[Any, ...], wrong: object) -> Any:
    result = deepcopy(value)
    at = result
    for part in key[:-1]:
        at = at[part]
    at[key[-1]] = wrong
    return result


@pytest.mark.parametrize("tool", CONFIGS)
def test_a_wrong_value_ends_in_no_traceback(tool: str, tmp_path: Path) -> None:
    """A third of the fields, each with another wrong value."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "sets.json").write_text(json.dumps(simpletuner.SETS))
    for number, key in enumerate(places(CONFIGS[tool])):
        if number % 3 == 0:
            wrong = WRONG[number // 3 % len(WRONG)]
            try:
                read_values(with_value(CONFIGS[tool], key, wrong), tmp_path)
            except (UserError, AssertionError):  # or the file is no config of this tool any more
                continue
