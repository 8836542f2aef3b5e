"""The forms for issues ask for what a bug report needs, and are forms that the host reads."""

from pathlib import Path
from typing import Any

import pytest
import yaml

FORMS = Path(__file__).parents[1] / ".github/ISSUE_TEMPLATE"
NAMES = ["bug", "curve", "wish"]


@pytest.mark.skipif(not FORMS.is_dir(), reason="an sdist has no forms")
@pytest.mark.parametrize("name", NAMES)
def test_a_form_asks_for_the_report_of_check(name: str) -> None:
    assert sorted(path.stem for path in FORMS.glob("*.yml")) == sorted([*NAMES, "config"])
    form: dict[str, Any] = yaml.safe_load((FORMS / f"{name}.yml").read_text())
    assert {"name", "description", "body"} == set(form)
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in fields} == {"textarea"}
    assert len({part["id"] for part in fields}) == len(fields)
    (report,) = (part for part in fields if part["id"] == "report")
    assert "`samecurve check --report`" in report["attributes"]["description"]
    assert report.get("validations", {}).get("required", False) == (name != "wish")
