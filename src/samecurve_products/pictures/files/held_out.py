"""Which pictures no step trains on: a choice by their content."""

import hashlib

_ALL = 1 << 64  # of the numbers by which pictures are held out


def held_out(contents: set[str], validation: float) -> set[str]:
    """Choose the contents, by their SHA-256, that no step trains on.

    Each content has a number of its own, drawn by its hash; those below the share are held out. So
    about that share is, equal files stay together, and adding or removing pictures moves no other
    one. There are three exceptions, for small sets: if the share is less than one picture, none is
    held out; else one is at least (the lowest number), and one at least is trained on.
    """
    if len(contents) * validation < 1 - 1e-9:
        return set()
    numbers = {content: _number(content) for content in contents}
    ordered = sorted(contents, key=lambda content: (numbers[content], content))
    held = {content for content in contents if numbers[content] < validation * _ALL}
    held.add(ordered[0])
    if len(contents) > 1 and len(held) == len(contents):
        held.remove(ordered[-1])
    return held


def _number(content: str) -> int:
    return int.from_bytes(hashlib.sha256(f"held out/{content}".encode()).digest()[:8], "big")
