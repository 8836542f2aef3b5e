"""How far a tokenizer's own rules can stretch a text.

A tokenizer.json may have any number of replacements, each of which makes the text some times
longer: fifteen that write ten letters for one fill any memory from a single letter.
"""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

MOST = 64.0  # times as long: a text of 1 MiB then takes about 1 GiB while it is tokenized
_NFKC = 18  # characters that Unicode's own form has for one, in the longest case

_SET = r"\[\^?(?:\\.|[^\[\]\\&])+\]"
_PART = re.compile(  # of an expression: with the sign of how often it is taken
    r"(?P<one>\\[sSdDwWhHtnr]|\\[pP]\{\^?\w+\}|\\u[0-9a-fA-F]{4}|\\[^\w\s`'<>]"
    rf"|{_SET}|[^\\\[\](){{}}|*+?^$])(?:(?P<perhaps>[*?]\??)|\+[?+]?|\{{[1-9]\d*(?:,\d*)?\}})?"
    r"|(?P<either>\|)|[\^$]"
    rf"|\((?:\?(?:[:=!>]|<[=!])|(?!\?))(?:\\.|{_SET}|[^\\\[\]()])*\)[*+?]?",
    re.DOTALL,
)


def stretching(part: Any) -> float:
    """How many times as long a text may become, at most.

    part: the normalizer or the decoder of the `tokenizers` library; None: there is none
    """
    factor = 1.0
    for rule in _rules(json.loads(part.__getstate__()) if part is not None else {}):
        factor *= _factor(rule)
    return factor


def _rules(rule: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rules of a sequence, and of the sequences in it."""
    inner = rule.get("normalizers", rule.get("decoders"))
    if inner is None:
        yield rule
    for each in inner or []:
        yield from _rules(each)


def _factor(rule: dict[str, Any]) -> float:
    kind = rule.get("type")
    if kind == "Replace":
        written, pattern = len(rule["content"]), rule["pattern"]
        if "String" in pattern:
            return max(1.0, written / max(1, len(pattern["String"])))
        if _takes_a_character(pattern["Regex"]):
            return max(1.0, written)
        return 1.0 + written  # the expression may match between any two characters
    if kind == "Prepend":  # to each text between two special tokens, which may be one character
        return 1.0 + len(rule["prepend"])
    if kind == "Precompiled":
        return max(1.0, _longest_of_map(rule["precompiled_charsmap"]) / _NFKC)
    return 1.0


def _takes_a_character(expression: str) -> bool:
    """Whether an expression can be seen to match no empty text: each alternative has a character.

    False of one that has other signs than these: their meaning is the library's.
    """
    place, takes = 0, False
    while place < len(expression):
        part = _PART.match(expression, place)
        if part is None or (part["either"] and not takes):
            return False
        takes = not part["either"] and (takes or bool(part["one"] and not part["perhaps"]))
        place = part.end()
    return takes


def _longest_of_map(charsmap: str) -> int:
    """The most characters that SentencePiece's map writes for some characters.

    The map is a search tree, whose length stands first, and the texts, each ended by a zero byte.
    """
    content = base64.b64decode(charsmap)
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max((len(text.decode(errors="replace")) for text in texts.split(b"\0")), default=0)
