"""A page in one HTML file: data, script and style inside, nothing loaded from anywhere.

The script is that of the live page: the modules of report/page/, joined without their imports. A
Content-Security-Policy lets run what stands here and nothing else, by its hash. Texts of a run are
data, which the script shows as text.
"""

import base64
import hashlib
import html
import json
import re
from functools import cache
from importlib.resources import files

from samecurve.seam import printable
from samecurve_products.report.blocks import Page

_MAIN = "frozen.js"
_UPLOT, _STYLES = "uplot/uPlot.iife.min.js", ("uplot/uPlot.min.css", "page.css")
_IMPORT = re.compile(r'^import (?:\{[^}]*\}|\* as \w+) from "\./([\w-]+\.js)";\n', re.MULTILINE)


def page_file(name: str) -> bytes:
    """A static file of the front end, by its path in report/page/. OSError: there is none."""
    return files(__package__).joinpath("page", name).read_bytes()


def frozen_html(page: Page, made_by: str, foot: str) -> str:
    """The page as one HTML document."""
    script, uplot = _script(), page_file(_UPLOT).decode()
    style = "".join(page_file(name).decode() for name in _STYLES)
    policy = (
        f"default-src 'none'; script-src {_hash(uplot)} {_hash(script)}; style-src {_hash(style)};"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )
    content = {"page": page, "made_by": made_by, "foot": foot}
    data = json.dumps(content, allow_nan=False, separators=(",", ":"))  # ASCII alone
    data = data.replace("<", "\\u003c")  # so that no script element ends within it
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{html.escape(made_by)}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{html.escape(printable(page["title"]))} \N{MIDDLE DOT} samecurve</title>
<style>{style}</style>
</head>
<body>
<noscript>A script in this file draws the page: allow it. It loads nothing.</noscript>
<script type="application/json" id="page">{data}</script>
<script>{uplot}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _script() -> str:
    """The modules that the frozen page needs as one, each behind those that it imports."""
    modules: dict[str, str] = {}

    def add(name: str) -> None:
        source = page_file(name).decode()
        for imported in _IMPORT.findall(source):
            if imported not in modules:
                add(imported)
        modules[name] = re.sub(r"^export ", "", _IMPORT.sub("", source), flags=re.MULTILINE)

    add(_MAIN)
    return "\n".join(modules.values())
