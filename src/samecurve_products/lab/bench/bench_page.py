"""The files of a benchmark: the numbers, one self-contained page, one picture for papers."""

import json
from typing import Any

import samecurve
from samecurve_products.report.bench_blocks import bench_blocks
from samecurve_products.report.blocks import Page
from samecurve_products.report.frozen import frozen_html
from samecurve_products.report.png import png
from samecurve_products.report.words import show_moment

_MADE_BY = "samecurve bench"


def bench_files(content: dict[str, Any], *, picture: bool = False) -> dict[str, bytes]:
    """Files of a benchmark, by name.

    content: of bench.json
    picture: also bench.png, all charts side by side
    """
    blocks = bench_blocks(content)
    page = Page(title=f"bench {content['config']}", blocks=blocks, runs=[])
    foot = (
        f"Made by {_MADE_BY} {samecurve.__version__}, {show_moment(content['time'])}. The same"
        " numbers, and more of them: bench.json."
    )
    files = {
        "bench.json": json.dumps(content, indent=1).encode(),
        "bench.html": frozen_html(page, _MADE_BY, foot).encode(),
    }
    if picture:
        charts = [block for block in blocks if block["type"] in {"chart", "bars"}]
        files["bench.png"] = png(charts, page, made_by=_MADE_BY)
    return files
