"""Show text that may come from anywhere: configs, data, names, messages of exceptions.

Characters that would move a cursor, colour a line, turn its direction or break an encoding are
shown as escapes (\\x1b); long texts are cut.
"""

import re
import sys

# control characters but newline and tab, those that hide or turn text, halves of characters
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """The text, with invisible characters as escapes."""
    return _HIDDEN.sub(lambda hidden: hidden[0].encode("unicode_escape").decode(), text)


def shorten(text: str, most: int, most_lines: int = 24) -> str:
    """The text, cut to so many characters and lines; the cut keeps its end."""
    lines = text[: most + 1].splitlines()
    if len(text) <= most and len(lines) <= most_lines:
        return text
    tail = most // 5
    head = "\n".join(lines[: most_lines - 4])[: most - tail]
    end = " ".join(text[-tail:].splitlines()[-3:])
    return f"{head} ... {end} ({len(text):,} characters in all)"


def echo(text: object, *, err: bool = False) -> None:
    """Write a line to stdout, or to stderr."""
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{printable(str(text))}\n")
    stream.flush()
