"""Blocks of a page as text: `samecurve data show` on a terminal and in a pipe."""

import re

import click

from samecurve_products.page.block_text import BlockText, sparkline


def test_text_of_a_terminal_and_of_a_pipe() -> None:
    """Colours, or marks; no line is wider than the terminal; nothing of the text is lost."""
    words = "a bird sang of the sea and of salt " * 6
    lines = [[{"text": words, "tone": "quiet"}, {"text": words, "tone": "loss"}]]
    block = {"type": "spans", "caption": "sample 1", "lines": lines}
    piped = BlockText(coloured=False, width=60).show([block])
    assert "⟦a bird" in piped
    assert max(map(len, piped.splitlines())) <= 60
    coloured = BlockText(coloured=True, width=60).show([block])
    assert "⟦" not in coloured
    assert "\x1b[1;32m" in coloured
    bare = click.unstyle(coloured)
    assert max(map(len, bare.splitlines())) <= 60
    for text in (bare, re.sub("[⟦⟧]", "", piped.partition("on)")[2])):
        assert text.split()[-len(words.split()) * 2 :] == (words * 2).split()
    assert sparkline([0, 1, None, 2, 4], 5) == "▁▃ ▅█"
    assert sparkline([2.0, 2.0], 5) == "▄▄"
