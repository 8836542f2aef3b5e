"""The JSON Schema for editors: it accepts every config of the repository, and finds mistakes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from samecurve.core.config.document import parse_document, read_document
from samecurve.core.config.json_schema import json_schema
from samecurve.core.config.loading import load_document
from samecurve.errors import UserError
from samecurve.tasks import Tasks

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs/config.schema.json"
LINE = re.compile(r"# yaml-language-server: \$schema=(\S+)\n")
CONFIGS = [path for folder in ("models", "examples") for path in (ROOT / folder).rglob("*.y*ml")]
LEAST = {"$schema": "config.schema.json", "batch": {"samples": 8}}


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json.loads(SCHEMA.read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_every_config_names_the_schema_and_is_valid_by_it(validator: Draft202012Validator) -> None:
    assert len(CONFIGS) > 30
    for path in CONFIGS:
        line = LINE.match(path.read_text())
        assert line, f"{path} has no line for editors"
        assert (path.parent / line[1]).resolve() == SCHEMA
        assert [
            error.message for error in validator.iter_errors(read_document(path).value)
        ] == [], path


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"hiden_size": 3}},
        {"train": {"steps": "2 epochs"}},
        {"optimizer": {"lr": "fast"}},
        {"task": "visoin"},
        {"task": "vision", "data": {"sorce": "digits"}},
        {"batch": {}, "$schema": 3},
        {"task": "own.py:Mine", "devices": {"stratgy": "ddp"}},
        {"model": {}, "bach": {"samples": 8}},
    ],
)
def test_a_mistake_is_found(validator: Draft202012Validator, change: dict[str, Any]) -> None:
    assert validator.is_valid(LEAST)
    assert not validator.is_valid({**LEAST, **change})


def test_a_user_class_may_have_any_fields_of_its_own(validator: Draft202012Validator) -> None:
    own = {"task": "own.py:Mine", "model": {"depth": [1, 2]}, "data": {"folder": "x"}}
    assert validator.is_valid({**LEAST, **own})
    one = Draft202012Validator(json_schema(Tasks(only="examples/my_task.py:MyTask")))
    assert one.is_valid({**LEAST, "model": {"width": 3}})


def test_the_key_for_editors_changes_nothing() -> None:
    text = "batch: {samples: 8}\n"
    for name, head in (("c.yaml", "$schema: ../s.json\n"), ("c.json", "")):
        with_key = f"{head}{text}" if head else '{"$schema": "s.json", "batch": {"samples": 8}}'
        document = parse_document(with_key, name)
        assert document.value == {"batch": {"samples": 8}}
        loaded, plain = (
            load_document(document, Tasks()),
            load_document(parse_document(text, "c.yaml"), Tasks()),
        )
        assert loaded.config == plain.config
        assert loaded.origins.keys() == plain.origins.keys()


def test_the_key_is_refused_where_it_is_not_for_an_editor() -> None:
    for text in ("$schema: 3\nbatch: {samples: 8}\n", "batch: {samples: 8, $schema: a}\n"):
        with pytest.raises(UserError, match="unknown key"):
            load_document(parse_document(text, "c.yaml"), Tasks())
