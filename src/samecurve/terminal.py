"""Text that may come from anywhere (configs, data, names, messages of exceptions), as it is shown.

What would move a cursor, colour a line, turn its direction or break an encoding is shown as an
escape (\\x1b); what has no end is cut.
"""

import re
import sys

# control characters but newline and tab, those that hide or turn text, halves of characters
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """The text, with what can't be seen as an escape."""
    return _HIDDEN.sub(lambda hidden: hidden[0].encode("unicode_escape").decode(), text)


def shorten(text: str, most: int, most_lines: int = 24) -> str:
    """At most so many characters and lines of a text, its end among them."""
    lines = text[: most + 1].splitlines()
    if len(text) <= most and len(lines) <= most_lines:
        return text
    tail = most // 5
    head = "\n".join(lines[: most_lines - 4])[: most - tail]
    end = " ".join(text[-tail:].splitlines()[-3:])
    return f"{head} ... {end} ({len(text):,} characters in all)"


def echo(text: object, *, err: bool = False) -> None:
    """A line on stdout, or on stderr."""
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{printable(str(text))}\n")
    stream.flush()
