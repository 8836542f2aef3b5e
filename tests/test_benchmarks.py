"""docs/benchmarks.md is what its result files say, and nothing else."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_of_benchmarks_is_made_from_its_results() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.page import PAGE, page_text
    finally:
        sys.path.remove(str(ROOT))
    assert PAGE.read_text() == page_text(), "python -m benchmarks.page makes it anew"
