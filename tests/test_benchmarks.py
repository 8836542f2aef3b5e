"""docs/benchmarks.md is what its result files say, and nothing else; so are the tables of
benchmarks/same_batch.md.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pages_of_benchmarks_are_made_from_their_results() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import page, same_batch_page
    finally:
        sys.path.remove(str(ROOT))
    for of in (page, same_batch_page):
        assert of.PAGE.read_text() == of.page_text(), f"python -m {of.__name__} makes it anew"
