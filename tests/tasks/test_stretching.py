"""Rules of a tokenizer that make texts longer are bounded before a text is read."""

import base64
from typing import Any

import pytest
from tokenizers import Regex, decoders, normalizers

from samecurve_products.text_files.stretching import MOST, stretching

USUAL = [
    None,
    normalizers.NFKC(),
    normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),  # Llama's
    normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]),
    normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    ),
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
]


@pytest.mark.parametrize("part", USUAL)
def test_the_usual_rules_are_far_below_the_bound(part: Any) -> None:
    assert 1.0 <= stretching(part) <= MOST / 8


@pytest.mark.parametrize(
    ("part", "factor"),
    [
        (normalizers.Replace("ab", "x" * 1000), 500.0),
        (normalizers.Replace(Regex("b*"), "x" * 99), 100.0),
        (normalizers.Prepend("x" * 199), 200.0),
        (normalizers.Sequence([normalizers.Sequence([normalizers.Replace("a", "bb")])] * 10), 1024),
        (decoders.Sequence([decoders.Replace("a", "bbbb")] * 5), 1024.0),
    ],
)
def test_rules_multiply(part: Any, factor: float) -> None:
    assert stretching(part) == factor > MOST


def test_clean_up_that_can_only_shorten_a_text_is_not_counted() -> None:
    rules = [r"\s+", " {2,}", r"[\r\n]+", r"^\s+|\s+$", r"\p{Mn}", r" *\n", r"(?<=a)\s+(?=\.)"]
    assert (
        stretching(normalizers.Sequence([normalizers.Replace(Regex(r), " ") for r in rules])) == 1
    )
    assert stretching(normalizers.Replace(Regex(r"\d"), "<digit>")) == 7


MAY_BE_EMPTY = r"b* b? a| |a a|b* \b ^ $ (?=x) (?<=a)(?=b) (a|b*) (?:ab)* a{0,2} a{2}? a*? \Bx*"
UNKNOWN = r"[[:space:]]* [a&&b]* (?i)b* \p{L}* [\]]* (?#a)"


@pytest.mark.parametrize("expression", [*MAY_BE_EMPTY.split(), *UNKNOWN.split()])
def test_an_expression_that_may_match_the_empty_text_writes_between_all_characters(
    expression: str,
) -> None:
    assert stretching(normalizers.Replace(Regex(expression), "xx")) == 3


def test_a_map_of_characters_counts_by_its_longest_text() -> None:
    texts = b"fi\0" + "ﷺ".encode() * 1800 + b"\0"

    class Map:
        def __getstate__(self) -> bytes:
            charsmap = base64.b64encode(b"\x04\0\0\0tree" + texts).decode()
            rule = f'{{"type": "Precompiled", "precompiled_charsmap": "{charsmap}"}}'
            return rule.encode()

    assert stretching(Map()) == 100.0
