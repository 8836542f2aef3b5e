"""The parts of docs/ that are made from the code: `make docs` writes them, tests compare them.

They are the config's JSON Schema, the table of its keys, the tables of strategies, the table of
known failures, the names of the seam, the table of the fault campaign, and the list of the features
(under src/).
"""

import json
import re
from pathlib import Path

from chaos_table import campaign_text
from samecurve import seam
from samecurve.core.config.json_schema import as_table, json_schema
from samecurve.core.feature_list import as_json
from samecurve.core.strategies import strategies_of
from samecurve.diagnose.known_failures import known_failures
from samecurve.tasks import Tasks

ROOT = Path(__file__).parents[1]


def generated_docs() -> dict[Path, str]:
    """The text that each of these files should have."""
    docs = ROOT / "docs"
    torch_rows = [row.docs_line for row in strategies_of("torch")]
    jax_rows = [f"| `{row.name}` | {row.holds} | {row.sends} |" for row in strategies_of("jax")]
    return {
        ROOT / "src/samecurve/features/list.json": json.dumps(as_json(), indent=1) + "\n",
        docs / "config.schema.json": json.dumps(json_schema(Tasks()), indent=1) + "\n",
        docs / "config.md": _with_config_table((docs / "config.md").read_text()),
        docs / "strategies.md": _with_rows((docs / "strategies.md").read_text(), torch_rows),
        docs / "jax.md": _with_rows((docs / "jax.md").read_text(), jax_rows),
        docs / "seam.md": _with_names((docs / "seam.md").read_text()),
        docs / "failures.md": _with_failures((docs / "failures.md").read_text()),
        ROOT / "benchmarks/chaos.md": _with_campaign((ROOT / "benchmarks/chaos.md").read_text()),
    }


def _with_config_table(page: str) -> str:
    """The page with the tables of keys anew: all between the comment and the next text."""
    head, mark, rest = page.partition("<!-- table: samecurve schema --table -->\n")
    tables = re.match(r"(?:\|[^\n]*\n|`task: \w+`\n|\n(?=[|`]))+", rest)
    assert tables, "docs/config.md has the comment and the tables after it"
    return f"{head}{mark}{as_table(Tasks())}\n{rest[tables.end() :]}"


def _with_rows(page: str, rows: list[str]) -> str:
    """The page with these rows in its first table, under the two lines of its head."""
    table = re.search(r"^\| `--strategy`[^\n]*\n\|---[^\n]*\n((?:\|[^\n]*\n)+)", page, re.MULTILINE)
    assert table, "the page has a table of strategies"
    return page[: table.start(1)] + "".join(f"{row}\n" for row in rows) + page[table.end(1) :]


# names of the seam that have no docstring: types by another name, and values
_WITHOUT_DOCSTRING = {
    "Arrays": "The arrays of a batch, by name.",
    "IGNORED": "The label of a position that a loss leaves out.",
    "Ids": "The ids of samples, int64.",
    "PATH": "The type of a click argument that is a path.",
    "Picture": "A picture, uint8 [height, width, 3].",
}


def _with_names(page: str) -> str:
    """The page with the table of the seam's names."""
    head, mark, _ = page.partition("| name | what it is |\n|---|---|\n")
    assert mark, "docs/seam.md ends with the table of names"
    rows = [f"| `{name}` | {_first_sentence(name)} |\n" for name in sorted(seam.PLACES)]
    return f"{head}{mark}{''.join(rows)}"


def _first_sentence(name: str) -> str:
    text = _WITHOUT_DOCSTRING.get(name) or getattr(seam, name).__doc__
    assert text, f"{name} has no docstring"
    sentence = re.match(r"(.+?\.)(?: |\n|$)", " ".join(text.split()))
    assert sentence, f"the docstring of {name} begins with no sentence"
    return sentence[1].replace("|", "\\|")


def _with_failures(page: str) -> str:
    """The page with the table of known failures."""
    head = "| failure | first remedy |\n|---|---|\n"
    before, mark, rest = page.partition(head)
    assert mark, "docs/failures.md has the table of known failures"
    rows = re.match(r"(?:\|[^\n]*\n)*", rest)
    assert rows
    return f"{before}{mark}{_failure_rows()}{rest[rows.end() :]}"


def _with_campaign(page: str) -> str:
    """The page with the table of the fault campaign and the sentence of its figures."""
    result = json.loads((ROOT / "benchmarks/results/chaos-amd-epyc.json").read_text())
    begin, end = "<!-- table: make chaos -->\n", "<!-- end of the table -->\n"
    before, _, rest = page.partition(begin)
    _, mark, after = rest.partition(end)
    assert mark, "benchmarks/chaos.md has both comments around the table of the campaign"
    return f"{before}{begin}{campaign_text(result)}\n{end}{after}"


def _failure_rows() -> str:
    """A row for each first clause of a remedy: the screen of a failed run has all of it."""
    names: dict[str, list[str]] = {}
    for known in known_failures():
        clause = re.match(r"(?:\([^)]*\)|[^;(])*", known.remedy)
        assert clause
        remedy = re.sub(r"\{\w+\}", "…", clause[0]).replace("|", r"\|")
        names.setdefault(remedy, []).append(f"{known.name}{' (again)' if known.again else ''}")
    return "".join(f"| {'; '.join(named)} | {remedy} |\n" for remedy, named in names.items())


if __name__ == "__main__":
    for path, text in generated_docs().items():
        path.write_text(text)
