"""The site that `make docs` builds: no link is dead, no other host is asked, its search works from
files, and it is readable in light, dark and on a narrow screen.

The figures of the front page are those of docs/benchmarks.md, and the README has them, too.
"""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Request

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^\|(?:[^\n]*\|\n)+", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(benchmarks\.md#([\w-]+)\)")
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("source", "srcset")}
CHROMIUM = Path("/usr/bin/chromium")
CHROMIUM_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_figures_of_the_front_page_are_measured() -> None:
    """Each number is in the section of the benchmarks that its row, or the line above, names."""
    front = (ROOT / "docs/index.md").read_text().partition("**What this version has**")[0]
    page = (ROOT / "docs/benchmarks.md").read_text()
    sections = {slug(part.partition("\n")[0]): part for part in page.split("\n## ")}
    found = 0
    for table in TABLE.finditer(front):
        above = front[: table.start()].rstrip().splitlines()[-1]
        for row in table[0].splitlines()[2:]:
            named = LINK.findall(row) or LINK.findall(above)
            figures = re.findall(
                r"(?<![\w.-])[-+]?\d+(?:\.\d+)?(?:e-\d+)?(?![\w-])", LINK.sub("", row)
            )
            assert named, row
            for figure in figures:
                assert figure in sections[named[0]], f"{figure} is not in #{named[0]}: {row}"
            found += len(figures)
    assert found > 20


def test_the_readme_compares_trainers_with_the_figures_of_the_front_page() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([\d.e-]+) \| ", (ROOT / "docs/index.md").read_text(), re.M)
    figures = dict(rows[:4])
    ours = figures.pop("Samecurve")
    assert f"Samecurve's are apart by {ours}:" in readme
    assert dict(re.findall(r"^\| ([^|]+) \| ([\d.e-]+) \| ", readme, re.M)) == figures


class Page(HTMLParser):
    """The links, the loaded files and the places of a built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := values.get(name))}
        for name, value in attrs:
            if not value:
                continue
            if (tag, name) in LOADED and values.get("rel") not in {"search", "next", "prev"}:
                self.loaded.append(value)
            elif name == "href":
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: a warning is an error."""
    for name in ("sphinx", "myst_parser", "furo"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[docs]'")
    home = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command += ["-c", "docs/site", "-d", str(home / "doctrees"), ".", str(home / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return home / "html"


@pytest.mark.long
def test_no_link_is_dead_and_nothing_comes_from_another_host(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > len([*ROOT.glob("docs/*.md")])
    dead = [
        f"{path.relative_to(site)}: {link}" for path in pages for link in dead_links(path, pages)
    ]
    assert dead == []
    for path, page in pages.items():
        assert [name for name in page.loaded if urlsplit(name).netloc] == [], path
    for path in [*site.rglob("*.css"), *site.rglob("*.js")]:
        text = path.read_text()
        assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*|@import[^;]*//[^;]*", text) == [], path
        assert re.findall(r"(?:fetch|importScripts|import)\(['\"]https?://[^)]*", text) == [], path


def dead_links(path: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """The links and loaded files of a page that lead nowhere within the site."""
    for link in [*pages[path].links, *pages[path].loaded]:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        place = unquote(parts.fragment)
        if not target.is_file() or (place and place not in pages[target].places):
            yield link


def note(asked: list[str], request: "Request") -> None:
    asked.append(request.url)


@pytest.mark.long
def test_it_is_read_and_searched_in_a_browser(site: Path) -> None:
    """From files, without a server, in light and dark and at 390 px; nothing else is asked for."""
    from playwright.sync_api import sync_playwright

    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_FLAGS)
        backgrounds = set()
        for scheme in ("light", "dark"):
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": 390, "height": 800}
            )
            asked: list[str] = []
            context.on("request", partial(note, asked))
            page = context.new_page()
            page.goto((site / "index.html").as_uri())
            page.wait_for_url("**/docs/index.html")
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            pictures = page.locator("img[alt^='Loss curves']:visible")
            assert pictures.count() == 1
            assert ("dark" in str(pictures.get_attribute("src"))) == (scheme == "dark")
            for name in ("docs/index", "docs/config", "docs/verify", "docs/for-agents", "README"):
                page.goto((site / f"{name}.html").as_uri())
                width = page.evaluate("document.documentElement.scrollWidth")
                assert width <= 390, f"{name} is {width} px wide"
            page.goto((site / "search.html").as_uri() + "?q=padding")
            page.wait_for_selector("ul.search li a")
            assert page.locator("ul.search li").count() >= 3
            assert [url for url in asked if not url.startswith("file:")] == []
            context.close()
        browser.close()
    assert len(backgrounds) == 2
