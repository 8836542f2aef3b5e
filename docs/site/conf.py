"""The site that `make docs` builds: the Markdown pages of the repository, as they are.

    python -m sphinx -W --keep-going -b html -c docs/site . site

Sphinx reads the pages where they lie; nothing is copied or written for it. What GitHub reads in
another way than Sphinx does is translated here, page by page: places that links name
(`<a id="...">`), pictures for light and dark, and the list of pages, which is made from the tables
of docs/index.md.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
FRONT = "docs/index"
OTHER_PAGES = ["README", "examples/README", "CONTRIBUTING", "CHANGELOG", "SECURITY"]

project = "Samecurve"
root_doc = FRONT
extensions = ["myst_parser"]
include_patterns = ["docs/*.md", *(f"{page}.md" for page in OTHER_PAGES)]
exclude_patterns = [".*", "benchmarks", "dist", "models", "runs", "scripts", "site", "src", "tests"]
suppress_warnings = ["misc.highlighting_failure"]  # what a command prints is no program
highlight_language = "none"

myst_heading_anchors = 6
myst_enable_extensions = ["attrs_inline"]

html_theme = "furo"
html_title = "Samecurve"
html_theme_options = {"top_of_page_buttons": []}
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_use_index = False
html_last_updated_fmt = None

_ANCHOR = re.compile(r'^<a id="([\w-]+)"></a>\n\n', re.MULTILINE)
_PICTURE = re.compile(
    r'<picture>\s*<source[^>]*srcset="([^"]+)">\s*<img src="([^"]+)" alt="([^"]+)">\s*</picture>'
)


def setup(app: Sphinx) -> None:
    app.connect("source-read", translate)
    app.connect("doctree-read", allow_links_to_anchors)
    app.connect("build-finished", lead_to_the_front_page)


def translate(_app: Sphinx, page: str, source: list[str]) -> None:
    """Write a page as MyST reads it."""
    text = _ANCHOR.sub(r"(\1)=\n", source[0])
    text = _PICTURE.sub(r"![\3](\2){.only-light}\n![\3](\1){.only-dark}", text)
    if page == FRONT:
        text += contents(text)
    source[0] = text


def contents(front: str) -> str:
    """The list of pages for the sidebar: a part for each heading of the front page with a table."""
    parts = []
    for section in re.split(r"^## ", front, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        cells = re.findall(r"^\|([^|]*)\|", text, re.MULTILINE)
        pages = [page for cell in cells for page in re.findall(r"\]\(([\w-]+)\.md\)", cell)]
        if pages:
            parts.append((title, pages))
    parts.append(("The repository", [f"/{page}" for page in OTHER_PAGES]))
    return "".join(
        "\n```{toctree}\n:hidden:\n:caption: " + title + "\n\n" + "\n".join(pages) + "\n```\n"
        for title, pages in parts
    )


def allow_links_to_anchors(app: Sphinx, tree: nodes.document) -> None:
    """Let other pages link to this page's anchors, as they do to its headings."""
    slugs = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for name, identity in tree.nameids.items():
        if identity:
            slugs.setdefault(name, (0, identity, name))


def lead_to_the_front_page(app: Sphinx, error: Exception | None) -> None:
    """Write the page that a server shows first."""
    if error is None:
        place = f"{FRONT}.html"
        Path(app.outdir, "index.html").write_text(
            f'<!doctype html><meta charset="utf-8"><title>{project}</title>'
            f'<meta http-equiv="refresh" content="0; url={place}"><a href="{place}">{project}</a>\n'
        )
