"""The tables of other tools are whole: each function and each group that a rule names is there."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from samecurve.convert import convert
from samecurve.convert.rules import _functions, _Interpreter, _read_table
from samecurve.core.config.document import Document

TOOLS = ("aitoolkit", "axolotl", "kohya", "llamafactory", "onetrainer", "oxidizr", "simpletuner")
SETTINGS = {"key", "value", "why", "remedy", "choices", "by", "compute", "field"} | {
    *("absent", "with", "when", "unless", "if_new", "but", "in_file_order")
}


def rules_in(rules: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for rule in rules:
        yield rule
        yield from rules_in(rule.get("group", []))


def conditions(rule: dict[str, Any]) -> list[object]:
    return [*rule.get("when", {}).values(), *rule.get("unless", {}).values()]


@pytest.mark.parametrize("tool", TOOLS)
def test_each_name_in_a_table_is_there(tool: str) -> None:
    table = _read_table(tool)
    shared = {"hf_trainer": _read_table("hf_trainer")} if "shared" in table else {}
    groups = {**shared.get("hf_trainer", {}), **table.get("groups", {})}
    functions = _functions("values", tool, *shared).keys()
    given = [rule for rules in (table["rules"], *groups.values()) for rule in rules_in(rules)]
    for rule in given:
        verb, *settings = rule
        assert hasattr(_Interpreter, f"_{verb}"), rule
        assert set(settings) <= SETTINGS, rule
        named = [rule[key] for key in ("by", "compute", "call") if key in rule]
        named += [
            test.removeprefix("is ")
            for test in conditions(rule)
            if isinstance(test, str) and test.startswith("is ")
        ]
        assert {name for name in named if not name.startswith("<")} <= functions, rule
        if "use" in rule and "compute" not in rule:
            assert rule["use"] in groups, rule
        for reason in rule.get("refuse_on", {}).values():
            texts = [reason] if isinstance(reason, str) else reason
            assert len(texts) <= 2, reason  # the reason, and the remedy
            assert all(isinstance(text, str) for text in texts), reason


def test_each_table_and_each_line_of_it_is_short() -> None:
    for file in files("samecurve.convert").iterdir():
        if file.name.endswith(".yaml"):
            lines = file.read_text(encoding="utf-8").splitlines()
            assert not [line for line in lines if len(line) > 100]


def test_a_conversion_changes_no_table() -> None:
    """What a flag sets in one config is not in the next one."""
    values = {"model": {}, "trainer": {"max_steps": 3, "batch_size": 2}}
    first = convert(Document(values))
    assert first is not None
    first.document.set("model.hidden_size", 8, "--set model.hidden_size")
    again = convert(Document(values))
    assert again is not None
    assert again.document.value["model"] == {}


def test_a_config_of_ours_loads_no_table() -> None:
    code = (
        "import sys; from samecurve.convert import convert;"
        "from samecurve.core.config.document import Document;"
        "assert convert(Document({'task': 'language', 'batch': {'samples': 4}})) is None;"
        "print(sorted(name for name in sys.modules if name.startswith('samecurve.convert')))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "['samecurve.convert']"
