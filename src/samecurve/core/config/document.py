"""A config file as plain values, each with the place where it stood in the file.

YAML (of which JSON is a part) is read node by node: only mappings, lists and plain scalars become
values, so that no tag can make an object and no nest of aliases can grow past a limit. `3e-4` is a
number here, unlike in YAML 1.1.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from samecurve.core.system import regular_only
from samecurve.errors import UserError

Key = tuple[str | int, ...]

SCHEMA_KEY = "$schema"  # for editors; at the top of a config

_MOST_BYTES = 1 << 20
_MOST_NODES = 20_000
_MOST_DEPTH = 50
_LARGEST = 1 << 63
_PAIR = re.compile(r"[\ud800-\udbff][\udc00-\udfff]")
_HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")
_TAGS = {
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "map", "seq")
}


class _Loader(yaml.SafeLoader):
    """Scalars are null, booleans, integers, floats (3e-4 too) or text; no dates, octals or base-60
    numbers.
    """


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE|yes|Yes|no|No|on|On|off|Off", list("tTfFyYnNoO")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9_]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf)|\.(nan|NaN)",
        list("-+0123456789."),
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first
    )


@dataclass
class Document:
    """Plain dictionaries, lists and scalars, and where each came from.

    origins: the place in the file, or the flag, of each key, for errors and for `plan`.
    """

    value: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)

    def set(self, key: str, value: Any, origin: str) -> None:
        """Put a value at a dotted key, in place of the value or section there."""
        _check_scalar(value, origin)
        path = tuple(key.split("."))
        at = self.value
        for depth, part in enumerate(path[:-1]):
            below = at.setdefault(part, {})
            if not isinstance(below, dict):
                raise UserError(
                    f"{'.'.join(path[: depth + 1])} is a value, not a section",
                    f"set {'.'.join(path[: depth + 1])} itself",
                    origin,
                )
            at = below
        at[path[-1]] = value
        for old in [place for place in self.origins if place[: len(path)] == path]:
            del self.origins[old]
        for inner in _keys_within(value):
            self.origins[*path, *inner] = origin

    def origin_of(self, key: Key) -> str:
        """Where a key, or the nearest section above it, came from; '' if none of them was given."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.origins:
                return self.origins[key[:length]]
        return ""


def _keys_within(value: Any) -> Iterator[Key]:
    """The keys within a value: its own, which is empty, and those of its sections."""
    yield ()
    if isinstance(value, dict):
        for name, item in value.items():
            yield from ((name, *key) for key in _keys_within(item))


def read_document(path: Path, *, regular: bool = False) -> Document:
    """The document of a YAML or JSON file.

    regular: the file lies in a run directory: nothing but an ordinary file is read

    UserError: missing, not text, too large, broken.
    """
    try:
        with open(path, "rb", opener=regular_only if regular else None) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UserError(
                f"{path} has more than {_MOST_BYTES} bytes, the most that a config has",
                "is this the data file? data is given with -d",
                str(path),
            )
        return parse_document(content.decode("utf-8"), str(path))
    except FileNotFoundError:
        from samecurve.core.system.shipped import is_shipped

        suffixes = {".yaml", ".yml", ".json", ".toml"}
        configs = [other.name for other in path.parent.glob("*") if other.suffix in suffixes]
        near = difflib.get_close_matches(path.name, configs, 1)
        remedy = "name a YAML or JSON file with -f"
        if near:
            remedy = f"did you mean {path.parent / near[0]}?"
        elif is_shipped(path):
            remedy = "`samecurve examples` writes models/ and examples/ into this directory"
        raise UserError(f"there is no config file {path}", remedy, "-f") from None
    except IsADirectoryError:
        raise UserError(
            f"{path} is a directory", "name a YAML or JSON file with -f", "-f"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start})",
            "is this the config file? data is given with -d",
            str(path),
        ) from None
    except OSError as error:
        raise UserError(
            f"{path} can't be read: {error.strerror}", "check its path and permissions", "-f"
        ) from None


def parse_document(text: str, name: str, *, list_key: str | None = None) -> Document:
    """The document of a text: YAML, JSON, or TOML where the name ends so.

    name: of the file or flag, for the places in errors
    list_key: the key of the document that a list becomes; None: a list is refused

    UserError: the text is not valid, or no mapping.
    """
    if name.endswith(".toml"):
        from samecurve.core.config.toml_document import parse_toml

        return Document(*parse_toml(text, name))
    if name.endswith(".json"):  # JSON has tabs between its tokens, which YAML forbids
        text = text.replace("\t", " ")
    try:
        node = yaml.compose(text, Loader=_Loader)
        document = Document()
        if node is None:
            return document
        builder = _Builder(name, document.origins)
        if list_key is not None and isinstance(node, yaml.SequenceNode):
            document.value = {list_key: builder.value(node, (list_key,), 1)}
            return document
        if not isinstance(node, yaml.MappingNode):
            raise UserError(
                "a config is a mapping of sections",
                "begin with `task: language`",
                _mark(node, name),
            )
        document.value = builder.value(node, (), 0)
        _leave_out_schema(document)
        return document
    except yaml.MarkedYAMLError as error:
        raise _broken(error, name) from None
    except yaml.YAMLError as error:
        raise UserError(
            f"not valid YAML: {' '.join(str(error).split())}", "a config is plain text", name
        ) from None
    except RecursionError:
        raise UserError(
            f"nested deeper than {_MOST_DEPTH} levels", "a config is two levels deep", name
        ) from None


def _leave_out_schema(document: Document) -> None:
    """Leave out the key with which an editor finds the config's JSON Schema: it is no value."""
    if isinstance(document.value.get(SCHEMA_KEY), str):
        del document.value[SCHEMA_KEY]
        del document.origins[SCHEMA_KEY,]


def _broken(error: yaml.MarkedYAMLError, name: str) -> UserError:
    """What is wrong with a text, at its place."""
    mark = error.problem_mark or error.context_mark
    where, kind, check = name, "YAML", "indentation and quotes"
    if mark:
        where = f"{name}:{mark.line + 1}:{mark.column + 1}"
    if name.endswith(".json"):
        kind, check = "JSON", "commas and quotes"
    cause = f"not valid {kind}: {error.problem or error.context}"
    return UserError(cause, f"check the {check} at this place", where)


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes where the loader above would read it as a number."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump_document(value: dict[str, Any], *, compact: bool = False) -> str:
    """The text of a document; parse() reads the same values back.

    compact: what holds plain values alone stands in one line, as people write it
    """
    style = None if compact else False
    return yaml.dump(
        value, Dumper=_Dumper, default_flow_style=style, sort_keys=False, allow_unicode=True
    )


def parse_setting(setting: str) -> tuple[str, Any]:
    """'optimizer.lr=3e-4' -> ('optimizer.lr', 0.0003); the value is read as YAML."""
    key, equals, text = setting.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[A-Za-z_][\w]*(\.[A-Za-z_][\w]*)*", key):
        raise UserError(
            f"--set {setting}: not KEY=VALUE", "for example --set optimizer.lr=3e-4", "--set"
        )
    return key, parse_document(
        f"value: {text.strip()}" if "\n" not in text else "", f"--set {key}"
    ).value.get("value")


def suggest(word: str, known: Iterable[str]) -> str:
    """'did you mean hidden_size?' or ''."""
    near = difflib.get_close_matches(word, list(known), 1, 0.6)
    return f"did you mean {near[0]}?" if near else ""


def _check_scalar(value: object, where: str) -> None:
    """UserError: a number too large to compute with, or text with half a character."""
    if isinstance(value, str) and _HALF_CHARACTER.search(value):
        raise UserError(
            f"{value[:40]} holds half a character, which no file can",
            "a path or a text of whole characters (UTF-8)",
            where,
        )
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        digits = f"about 10 to the {int(value.bit_length() * 0.30103)}"
        raise UserError(f"a number of {digits}", f"nothing here is beyond {_LARGEST}", where)


def _joined(pair: str) -> str:
    """The character whose two halves (UTF-16 surrogates) these are."""
    return pair.encode("utf-16", "surrogatepass").decode("utf-16")


class _Builder:
    """Converts YAML nodes to plain values, and counts them."""

    def __init__(self, name: str, places: dict[Key, str]) -> None:
        self._name, self._places, self._count = name, places, 0
        self._scalars = _Loader("")

    def value(self, node: yaml.Node, key: Key, depth: int) -> Any:
        self._count += 1
        if self._count > _MOST_NODES or depth > _MOST_DEPTH:
            raise UserError(
                f"more than {_MOST_NODES} values or {_MOST_DEPTH} levels",
                "is there an alias that repeats itself?",
                _mark(node, self._name),
            )
        if key:
            self._places[key] = _mark(node, self._name)
        if node.tag not in _TAGS:
            raise UserError(
                f"the tag {node.tag} has no meaning here",
                "write the plain value",
                _mark(node, self._name),
            )
        if isinstance(node, yaml.MappingNode):
            return dict(self._items(node, key, depth))
        if isinstance(node, yaml.SequenceNode):
            return [
                self.value(item, (*key, index), depth + 1) for index, item in enumerate(node.value)
            ]
        try:
            value = self._scalars.construct_object(node)
            if isinstance(value, str):  # JSON writes a character beyond 65535 in two halves
                value = _PAIR.sub(lambda pair: _joined(pair[0]), value)
            _check_scalar(value, _mark(node, self._name))
            return value
        except (ValueError, KeyError, IndexError):
            raise UserError(
                f"{node.value[:40]!r} is not what its form says",
                "write a plain number, word or quoted text",
                _mark(node, self._name),
            ) from None

    def _items(self, node: yaml.MappingNode, key: Key, depth: int) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for name_node, node_value in node.value:
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else None
            where = _mark(name_node, self._name)
            if not isinstance(name, str):
                raise UserError("a key must be a word", "write `name: value`", where)
            if name in seen:
                raise UserError(
                    f"{'.'.join(map(str, (*key, name)))} is given twice", "keep one of them", where
                )
            _check_scalar(name, where)
            seen.add(name)
            value = self.value(node_value, (*key, name), depth + 1)
            self._places[(*key, name)] = where
            yield name, value


def _mark(node: yaml.Node, name: str) -> str:
    return f"{name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def join_key(key: Sequence[str | int]) -> str:
    """('optimizer', 'lr') -> 'optimizer.lr'."""
    return ".".join(map(str, key))
