"""The tables of other tools are whole: each function and each group that a rule names is there."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from samecurve.cli.options import CONFIG_OPTIONS
from samecurve.core.config.document import Document
from samecurve_products.convert.rules import _functions, _Interpreter, _read_table
from samecurve_products.convert.tools import convert

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
            assert len(texts) <= 3, reason  # the reason, the remedy, and the key
            assert all(isinstance(text, str) for text in texts), reason


_FLAGS = {  # of convert, train and plan: the key that each sets
    dashes: option.key for option in CONFIG_OPTIONS for dashes in option.opts if option.key
}


def refusals_in(rules: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The remedy of each refusal, and the key that settles it."""
    for rule in rules_in(rules):
        if "refuse" in rule or "choices" in rule:
            yield rule.get("remedy", ""), rule.get("key", "")
        for reason in rule.get("refuse_on", {}).values():
            if not isinstance(reason, str):
                yield reason[1], (*reason, rule.get("key", ""))[2]


@pytest.mark.parametrize("tool", [*TOOLS, "hf_trainer"])
def test_a_flag_that_a_remedy_names_settles_the_refusal(tool: str) -> None:
    """What must be taken out of the file all the same is said first."""
    table = _read_table(tool)
    groups = [rules for rules in table.get("groups", table).values() if isinstance(rules, list)]
    rules = [*table.get("rules", []), *(rule for group in groups for rule in group)]
    for remedy, key in refusals_in([rule for rule in rules if isinstance(rule, dict)]):
        if remedy.startswith("take it out of the file"):
            continue
        set_keys = re.findall(r"--set ([\w.]+)=", remedy)
        flags = [word for word in re.findall(r"(?<!\S)--?[a-z][\w-]*", remedy) if word != "--set"]
        for named in (*set_keys, *(_FLAGS[flag] for flag in flags)):
            is_within = named == key or named.startswith(f"{key}.") or key.startswith(f"{named}.")
            assert is_within, (remedy, key)


def test_each_table_and_each_line_of_it_is_short() -> None:
    for file in files("samecurve_products.convert").iterdir():
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
    room = "samecurve_products.convert"
    code = (
        "import sys; from samecurve_products.convert.tools import convert;"
        "from samecurve.core.config.document import Document;"
        "assert convert(Document({'task': 'language', 'batch': {'samples': 4}})) is None;"
        f"print(sorted(name for name in sys.modules if name.startswith('{room}')))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == f"['{room}', '{room}.tools']"
