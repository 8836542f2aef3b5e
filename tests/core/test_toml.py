"""TOML, in which other tools write: each key has its line, and a fault its place."""

import pytest

from samecurve.core.config.document import parse_document
from samecurve.errors import UserError

TEXT = """\
# a comment = 1
top = 1
[plain]
note = '''
looks = "like a key"
'''
[[sets]]
size = [512,
  512]
  [[sets.parts]]
  "a name".inner = true
  [[sets.parts]]
  day = 2024-05-01
[[sets]]
  [[sets.parts]]
  last = 0.5
"""


def test_values_and_their_lines() -> None:
    document = parse_document(TEXT, "c.toml")
    assert document.value == {
        "top": 1,
        "plain": {"note": 'looks = "like a key"\n'},
        "sets": [
            {"size": [512, 512], "parts": [{"a name": {"inner": True}}, {"day": "2024-05-01"}]},
            {"parts": [{"last": 0.5}]},
        ],
    }
    lines = {key: place.split(":")[1] for key, place in document.origins.items()}
    assert lines[("top",)] == "2"
    assert lines[("plain", "note")] == "4"
    assert ("plain", "looks") not in lines
    assert lines[("sets", 0, "parts", 0, "a name", "inner")] == "11"
    assert lines[("sets", 0, "parts", 1, "day")] == "13"
    assert lines[("sets", 1, "parts", 0, "last")] == "16"
    assert document.origin_of(("sets", 0, "size", 1)) == "c.toml:8:1"


def test_a_fault_has_its_place() -> None:
    with pytest.raises(UserError) as caught:
        parse_document("a = 1\nb = [1,\nc = 2\n", "c.toml")
    assert "c.toml:3:" in str(caught.value)
    assert "not valid TOML" in str(caught.value)
