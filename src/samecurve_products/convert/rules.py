"""The interpreter of the tables that turn another tool's config into ours.

TOOL.yaml holds rules in order, each for some fields. The first rule that handles a field decides
what becomes of it, so a table reads from the special case to the general one. Where a rule needs
code, it names a function of TOOL.py or values.py, or an entry of their FUNCTIONS. A function
`prepare` of TOOL.py turns a document of several forms into the one that the rules read.

read: FIELDS       become `key`: as they stand, or as `value`, by a table of `choices` (a word that
                   is not in the table is refused with `remedy`), by the function `by` of the
                   field's value, or by the function `compute` of the whole config. `absent: [VALUE,
                   WHY]` is the default where the file has no such field.
same: {FIELD: KEY} are read as they stand
skip: FIELDS       are not needed, `why`; `lora_*` is every field that begins so, `but` one
refuse: FIELD      can't be honoured, `why`, `remedy`; a flag that sets `key` settles that; with
                   `absent: VALUE` it is what the tool does where the file has no such field
refuse_on: {FIELD: [WHY, REMEDY, KEY]}  are refused where they are switched on; a field without
                   KEY has the rule's `key`, as above
default: KEY       gets `value` (or `compute`, or the value of another `field`), `why`; with
                   `if_new` only if no field has set it
run_directory: FIELD
call: FUNCTION     does it all
use: GROUP         (or the one that `compute` names): rules of `groups`, or of the table that is
                   `shared`; `with: {NAME: VALUE}` fills in each <NAME>
group: RULES       share a condition

`when` and `unless` are conditions on fields: a value, a list of values, `is FUNCTION`, or
`word WORD` (in small letters or capitals).
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from samecurve.seam import Document, parse_document
from samecurve_products.convert.companions import Companions
from samecurve_products.convert.converted_config import ConvertedConfig, short_text
from samecurve_products.convert.foreign_config import LEAVE_OUT, SAME, ForeignConfig

Rule = Mapping[str, Any]  # as its table writes it


def convert_config(tool: str, document: Document, companions: Companions) -> ConvertedConfig:
    """Read every field of the document by the table of its tool. tool: the table's file name."""
    table = _read_table(tool)
    shared = table.get("shared")  # a table whose groups, and whose functions, this one uses too
    groups = {**(_read_table(shared) if shared else {}), **table.get("groups", {})}
    functions = _functions("values", *([shared] if shared else []), tool)
    if "prepare" in functions:
        document = functions["prepare"](document)
    foreign = ForeignConfig(document, tuple(table.get("sections", ())), companions)
    for key, value in table["fixed"].items():
        foreign.document.set(key, value, f"a config of {table['tool']}")
    _Interpreter(foreign, functions, groups).run(table["rules"])
    foreign.refuse_unknown(_known_fields(table))
    for section in table.get("needed", "").split():
        foreign.document.value.setdefault(section, {})
    return ConvertedConfig(
        table["tool"],
        foreign.document,
        tuple(foreign.readings),
        foreign.refusals_with_origins(),
        foreign.run_directory,
    )


def _functions(*modules: str) -> dict[str, Any]:
    """The functions that tables may name, by name; those of later modules win."""
    functions: dict[str, Any] = {}
    for name in modules:
        module = import_module(f"samecurve_products.convert.{name}")
        functions |= {**vars(module), **module.FUNCTIONS}
    return functions


def _read_table(name: str) -> Mapping[str, Any]:
    """A table of its own for each conversion: values of it become values of a config."""
    return deepcopy(_parsed_table(name))


@cache
def _parsed_table(name: str) -> Mapping[str, Any]:
    file = files("samecurve_products.convert") / f"{name}.yaml"
    return parse_document(file.read_text(encoding="utf-8"), file.name).value


@dataclass(frozen=True)
class _Interpreter:
    """Applies rules, one after the other, to one config."""

    foreign: ForeignConfig
    functions: Mapping[str, Callable[[Any], Any]]
    groups: Mapping[str, Any]  # name -> rules

    def run(self, rules: Iterable[Rule]) -> None:
        for rule in rules:
            if self._applies(rule):
                verb, what = next(iter(rule.items()))
                getattr(self, f"_{verb}")(what, rule)

    def _applies(self, rule: Rule) -> bool:
        when, unless = rule.get("when", {}), rule.get("unless", {})
        return all(self._passes(*test) for test in when.items()) and not any(
            self._passes(*test) for test in unless.items()
        )

    def _passes(self, field: str, test: object) -> bool:
        """Whether a field passes a test; null counts as not in the file."""
        value = self.foreign.value(field)
        if isinstance(test, str) and test.startswith("is "):
            return bool(self.functions[test.removeprefix("is ")](value))
        if isinstance(test, str) and test.startswith("word "):
            return str(value).upper() == test.removeprefix("word ").upper()
        if isinstance(test, list):
            return value in test
        if isinstance(test, bool):
            return value is test
        return value == test

    def _read(self, fields: str, rule: Rule) -> None:
        for field in fields.split():
            if "choices" in rule:
                self._choose(field, rule)
            else:
                value = self._computed(rule, rule.get("value", SAME))
                if "by" in rule and self.foreign.value(field) is not None:
                    value = self.functions[rule["by"]](self.foreign.value(field))
                self.foreign.convert(field, rule["key"], value, rule.get("why", ""))
            if "absent" in rule and self.foreign.value(field) is None:
                self.foreign.add_default(rule["key"], *rule["absent"])

    def _choose(self, field: str, rule: Rule) -> None:
        """A word in capitals, or a switch, has a value of ours; any other value is refused."""
        choices: Mapping[str, object] = rule["choices"]
        value = self.foreign.value(field)
        choice = value.strip().upper() if isinstance(value, str) else short_text(value)
        if value is None:
            self.foreign.convert(field, rule["key"])
        elif choice in choices:
            self.foreign.convert(field, rule["key"], choices[choice], rule.get("why", ""))
        else:
            why = f"is not one of {', '.join(choices)}, which there are here"
            self.foreign.refuse(field, why, rule["remedy"], rule["key"])

    def _computed(self, rule: Rule, value: Any) -> Any:
        """The result of the function `compute`, or another field's value, or else the value."""
        if "compute" in rule:
            return self.functions[rule["compute"]](self.foreign)
        return self.foreign.value(rule["field"]) if "field" in rule else value

    def _same(self, keys: Mapping[str, str], _rule: Rule) -> None:
        for field, key in keys.items():
            self.foreign.convert(field, key)

    def _skip(self, names: str, rule: Rule) -> None:
        listed = [name for name in names.split() if not name.endswith("*")]
        beginnings = tuple(name[:-1] for name in names.split() if name.endswith("*"))
        if beginnings or rule.get("in_file_order"):
            listed = [
                field
                for field in self.foreign.open_fields()
                if field in listed or (field.startswith(beginnings) and field != rule.get("but"))
            ]
        for field in listed:
            self.foreign.ignore(field, rule["why"])

    def _refuse(self, field: str, rule: Rule) -> None:
        why, key = rule["why"], rule.get("key", "")
        if "absent" in rule and self.foreign.value(field) is None:
            self.foreign.refuse_default(field, rule["absent"], why, rule["remedy"], key)
        else:
            self.foreign.refuse(field, why, rule.get("remedy", LEAVE_OUT), key)

    def _refuse_on(self, reasons: Mapping[str, Any], rule: Rule) -> None:
        for field, reason in reasons.items():
            if self.foreign.value(field) in (None, False, 0, "", [], {}):
                self.foreign.ignore(field, "switched off")
            else:
                why, remedy, key = reason, LEAVE_OUT, rule.get("key", "")
                if not isinstance(reason, str):
                    why, remedy, *own_key = reason
                    key = own_key[0] if own_key else key
                self.foreign.refuse(field, why, remedy, key)

    def _default(self, key: str, rule: Rule) -> None:
        if not (rule.get("if_new") and self.foreign.is_set(key)):
            self.foreign.add_default(key, self._computed(rule, rule.get("value")), rule["why"])

    def _run_directory(self, field: str, _rule: Rule) -> None:
        directory = self.foreign.value(field)
        if isinstance(directory, str) and directory:
            self.foreign.run_directory = directory
            self.foreign.ignore(field, "the run directory, unless --save-dir names another")

    def _call(self, function: str, _rule: Rule) -> None:
        self.functions[function](self.foreign)

    def _use(self, group: str, rule: Rule) -> None:
        name = self._computed(rule, group)
        self.run(_filled_in(self.groups[name], rule.get("with", {})))

    def _group(self, rules: Iterable[Rule], _rule: Rule) -> None:
        self.run(rules)


def _filled_in(item: Any, values: Mapping[str, object]) -> Any:
    """A part of a table with values in place of their <NAME>."""
    if isinstance(item, dict):
        return {_filled_in(key, values): _filled_in(each, values) for key, each in item.items()}
    if isinstance(item, list):
        return [_filled_in(each, values) for each in item]
    if not isinstance(item, str):
        return item
    for name, value in values.items():
        if item == f"<{name}>":
            return value
        item = item.replace(f"<{name}>", str(value))
    return item


def _known_fields(table: Mapping[str, Any]) -> list[str]:
    """The fields to suggest in place of an unknown one."""
    tables = [rule.get("same") or rule.get("refuse_on") or {} for rule in table["rules"]]
    return [*table["known"].split(), *(field for fields in tables for field in fields)]
