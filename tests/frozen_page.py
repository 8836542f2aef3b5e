"""A page in one HTML file, as a reader's browser takes it: its elements, its policy, its data."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_ELEMENTS = {"html", "head", "meta", "title", "style", "body", "noscript", "script"}


class FrozenPage(HTMLParser):
    """The page of a file. AssertionError: it would load something, or run what is not its own."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.policy = ""
        self.inner: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._attributes: dict[str, str | None] = {}
        self.feed(content)
        assert not self.open
        data, *scripts = self.inner["script"]
        content_json: dict[str, Any] = json.loads(data, parse_constant=_refuse)
        self.page: dict[str, Any] = content_json["page"]
        self.foot: str = content_json["foot"]
        self.blocks = list(_all_blocks(self.page["blocks"]))
        self.text = "\n".join(_texts(self.page["blocks"]))
        allowed = re.findall(r"'sha256-([^']+)'", self.policy)
        for element in (*scripts, *self.inner["style"]):
            digest = hashlib.sha256(element.encode()).digest()
            assert base64.b64encode(digest).decode() in allowed
        assert len(allowed) == len(scripts) + len(self.inner["style"])
        assert "default-src 'none'" in self.policy
        assert "unsafe" not in self.policy

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _ELEMENTS
        names = dict(attrs)
        assert not [name for name in names if name.startswith("on") or name in {"src", "href"}]
        if names.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(names["content"])
        if tag != "meta":
            self.open.append(tag)
            self.inner.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.inner[self.open[-1]][-1] += data

    def named(self, kind: str) -> dict[str, dict[str, Any]]:
        """The charts or bars, by name."""
        return {block["name"]: block for block in self.blocks if block["type"] == kind}


def read_page(path: Path) -> FrozenPage:
    return FrozenPage(path.read_text())


def decoded(array: Any) -> list[float]:
    """An Array of a page as numbers; a gap is nan."""
    import numpy as np

    if isinstance(array, list):
        return [float("nan") if value is None else value for value in array]
    (form, text), *_ = array.items()
    numbers = np.frombuffer(base64.b64decode(text), {"f32": "<f4", "f64": "<f8"}[form])
    return [float(value) for value in numbers]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _all_blocks(blocks: list[Any]) -> Iterator[dict[str, Any]]:
    for block in blocks:
        if isinstance(block, list):
            yield from _all_blocks(block)
            continue
        yield block
        yield from _all_blocks(block.get("blocks", []))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
