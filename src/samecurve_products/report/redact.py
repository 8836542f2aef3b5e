"""Secrets in texts that are shown or sent: passwords and access tokens, hidden by key and by value.

A text is searched for `key = value` whose key names a secret, and for values that show by their
form what they are. One word stands for what is hidden, so a reader sees that something is there.
"""

import re
from typing import Any

HIDDEN = "[hidden]"
_WORD = (
    r"token|password|passwd|passphrase|secret|credentials?|authorization|signature"
    r"|(?:api|access|secret|private|account|auth)[_.\-]?key"
)
_NAME = rf"(?:[\w.\-]*[_.\-])?(?:{_WORD})"
_KEY = re.compile(rf"{_NAME}\Z", re.IGNORECASE)
# tokens of a vocabulary, which are no secrets
_HARMLESS_KEY = re.compile(
    r"(?:.*[._\-])?(?:pad|eos|bos|unk|mask|sep|cls|image|start|end|stop|next|special)[_.\-]token\Z",
    re.IGNORECASE,
)
# a key, what stands between it and its value, and the value: quoted, or up to a space or a comma
_ASSIGNED = re.compile(
    rf"(?P<key>(?<![\w.\-])-{{0,2}}{_NAME})(?P<between>[\"']?\s*[=:]\s*)"
    r"(?:(?P<quote>[\"'])(?P<quoted>[^\"'\n]*)(?P=quote)"
    r"|(?P<plain>(?:(?:Bearer|Basic|Token)\s+)?[^\s,;&\"'{}\[\]()<>]+))",
    re.IGNORECASE,
)
_FLAG = re.compile(rf"((?<![\w\-])--{_NAME}\s+)[^\s\-]\S*", re.IGNORECASE)
_PLAIN_VALUES = re.compile(r"(?:null|none|true|false|~|\d{1,5})\Z", re.IGNORECASE)
_BY_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}"
    r"|\b(?:sk|rk|pk)-[A-Za-z0-9_\-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w\-]{16,}"
    r"|\bxox[abeoprs]-[\w\-]{8,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w\-]{30,}"
    r"|\bwandb_v\d_\w{16,}|\bnvapi-[\w\-]{16,}"
    r"|\beyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]{4,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----|[\s\S]*)"
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9+/_.~\-]{8,}=*", re.IGNORECASE)
_USER_OF_URL = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")


def redact(text: str) -> str:
    """The text, with the secrets in it hidden."""
    text = _ASSIGNED.sub(_hide_assigned, text)
    text = _FLAG.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _BY_VALUE.sub(HIDDEN, text)
    return _USER_OF_URL.sub(HIDDEN, text)


def names_secret(key: str) -> bool:
    """Whether the value of this key (of a config, of an environment) is a secret."""
    return bool(_KEY.search(key)) and not _HARMLESS_KEY.match(key)


def _hide_assigned(found: re.Match[str]) -> str:
    value = found["quoted"] if found["quote"] else found["plain"]
    if not value or _PLAIN_VALUES.match(value) or _HARMLESS_KEY.match(found["key"]):
        return found[0]
    quote = found["quote"] or ""
    return f"{found['key']}{found['between']}{quote}{HIDDEN}{quote}"


def redact_blocks(value: Any) -> Any:
    """A page's blocks, or any JSON, with the secrets hidden in all of its texts.

    Where the first cell of a table's row, or a key, names a secret, its whole value is hidden.
    Pictures inside the page stay as they are.
    """
    if isinstance(value, str):
        return value if value.startswith("data:") else redact(value)
    if isinstance(value, dict):
        return {
            key: HIDDEN if names_secret(key) and _is_text(item) else redact_blocks(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        if len(value) > 1 and (name := _text_of(value[0])) and names_secret(name):
            return [redact_blocks(value[0]), *(_hidden_cell(cell) for cell in value[1:])]
        return [redact_blocks(item) for item in value]
    return value


def _text_of(cell: Any) -> str:
    text = cell.get("text") if isinstance(cell, dict) else cell
    return text if isinstance(text, str) else ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and not _PLAIN_VALUES.match(value)


def _hidden_cell(cell: Any) -> Any:
    if isinstance(cell, dict) and _is_text(cell.get("text")):
        return {**cell, "text": HIDDEN}
    return HIDDEN if _is_text(cell) else cell
