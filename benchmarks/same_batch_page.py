"""The tables of benchmarks/same_batch.md, made from benchmarks/results/same-batch-*.json.

Run: python -m benchmarks.same_batch_page
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.page import table

PAGE = Path(__file__).parent / "same_batch.md"
Result = Mapping[str, Any]
NAMES = {
    "samecurve": "Samecurve",
    "trainer": "HF Trainer",
    "trainer, means": "HF Trainer, `average_tokens_across_devices=False`",
    "accelerate": "Accelerate, targets counted (its guide)",
    "accelerate, means": "Accelerate, `accumulate()` and the model's mean",
}
CAUSES = ("none of them", "ragged documents", "short tail", "dropout", "router balance")


def page_text() -> str:
    """The page with its tables made anew."""
    (path,) = RESULTS.glob("same-batch-*.json")
    result: Result = json.loads(path.read_text())
    text = PAGE.read_text()
    parts = {
        "all": f"{_measured_on(result)}\n\n{_all_at_once(result)}",
        "causes": _causes(result),
        "right": _right(result),
    }
    for name, part in parts.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{begin}{part}\n{end}{after}"
    return text


def _all_at_once(result: Result) -> str:
    """The last step's loss on each number of ranks."""
    rows = []
    for side, found in result["summary"]["all"].items():
        losses = [f"{loss:.6f}" for loss in found["last_losses"].values()]
        apart = [f"{found['spread']:.1g}", f"{found['held_out_spread']:.1g}"]
        rows.append([NAMES[side], *losses, *apart])
    head = ["last loss on", "1", "2", "4", "largest difference at any step", "of the held-out loss"]
    return table(head, rows)


def _causes(result: Result) -> str:
    rows = [
        [name, *(f"{result['summary'][cause][side]['spread']:.1g}" for cause in CAUSES)]
        for side, name in NAMES.items()
    ]
    return table(["", *CAUSES], rows)


def _measured_on(result: Result) -> str:
    versions: Sequence[str] = [f"{name} {v}" for name, v in result["trainers"].items()]
    torch = result["versions"]["torch"]
    return (
        f"Ragged documents, a short tail and dropout of 0.1 in attention, on {result['machine']},"
        f" {result['cores']} cores; torch {torch}, {', '.join(versions)}. The held-out loss is an"
        " exact mean over 200 documents of what each run ended with."
    )


def _right(result: Result) -> str:
    """Largest differences at any step."""
    counting = "Samecurve, HF Trainer and Accelerate, on 1, 2 and 4 ranks each"
    rows = [["one batch", counting, f"{result['one_batch']:.1g}"]]
    rows += [
        ["same order", _pair(words), f"{apart:.1g}"]
        for words, apart in result["same_order"].items()
    ]
    return table(["documents", "who", "largest difference at any step, nats"], rows)


def _pair(words: str) -> str:
    first, _, second = words.partition(" and ")
    return " and ".join(NAMES[name].partition(",")[0] for name in (first, second))


if __name__ == "__main__":
    PAGE.write_text(page_text())
    print(PAGE)
