"""A real browser in front of a real `samecurve ui`: what the tests of the web page share."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Page, Request, expect, sync_playwright

from commands import write_config
from samecurve.core.events import Event
from samecurve.observe import append_event

CHROMIUM = Path("/usr/bin/chromium")
MISSING = f"{CHROMIUM} is not there: apt-get install chromium"
expect.set_options(timeout=60_000)  # milliseconds: a run starts in 3 s, beside other tests in 20 s
WIDE = {"width": 1280, "height": 900}
NARROW = {"width": 390, "height": 844}
TWO_FRAMES = "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"


@contextmanager
def web_server(root: Path) -> Iterator[str]:
    """`samecurve ui` below a directory; gives the URL that it prints."""
    command = [sys.executable, "-m", "samecurve", "ui", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as server:
        try:
            assert server.stdout is not None
            url = None
            while url is None:
                line = server.stdout.readline()
                assert line, "samecurve ui printed no URL"
                url = re.search(r"http://\S+", line)
            yield url[0]
        finally:
            server.terminate()
            server.wait(20)


@dataclass
class Site:
    """The page of a server in a browser. What its scripts complain of fails the test."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)
    unanswered: set[Request] = field(default_factory=set)

    def open(self, place: str) -> None:
        """Open a page: "runs", "run/ID"."""
        self.page.goto(f"{self.origin}/#/{place}")

    def began(self, request: Request) -> None:
        self.unanswered.add(request)

    def ended(self, request: Request) -> None:
        self.unanswered.discard(request)

    def settle(self) -> None:
        """Wait until the page has the answers to all that it asks for, and has drawn them."""
        self.page.evaluate(TWO_FRAMES)
        while self.unanswered:
            self.page.wait_for_timeout(20)
            self.page.evaluate(TWO_FRAMES)

    def read(self, path: str) -> Any:
        """The answer of the server to a request with the browser's cookie."""
        return self.page.request.get(f"{self.origin}/api/{path}").json()

    def run_id(self, name: str) -> str:
        (found,) = [run["id"] for run in self.read("runs")["runs"] if run["name"].endswith(name)]
        return str(found)


@contextmanager
def browser(size: Any = WIDE, *, offline: bool = False) -> Iterator[BrowserContext]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = chromium.new_context(viewport=size, offline=offline)
        context.set_default_timeout(30_000)
        try:
            yield context
        finally:
            chromium.close()


def watch_complaints(page: Page, complaints: list[str]) -> None:
    """Collect errors of scripts and what the content security policy refuses."""
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda message: complaints.append(message.text) if message.type == "error" else None,
    )


def watch_requests(page: Page) -> list[str]:
    """The addresses that a page asks for, from now on."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    return asked


@contextmanager
def opened(root: Path, size: Any = WIDE) -> Iterator[Site]:
    """The page of a server below a directory, in a browser of its own."""
    with web_server(root) as url, browser(size) as context:
        page = context.new_page()
        site = Site(page, url.partition("/?")[0])
        watch_complaints(page, site.complaints)
        page.on("request", site.began)
        page.on("requestfinished", site.ended)
        page.on("requestfailed", site.ended)
        page.goto(url)
        yield site
        assert not site.complaints


def write_root(home: Path, corpus: Path, steps: int) -> Path:
    """A directory with tiny.yaml, whose text lies beside it."""
    home.mkdir(exist_ok=True)
    (home / "squares.txt").write_text(corpus.read_text())
    return write_config(home, Path("squares.txt"), steps=steps, save=steps)


HOSTILE = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"


def plant_hostile_texts(run: Path) -> None:
    """Texts that would run as script if any of them became markup: in samples, warnings, logs."""
    for event in (
        Event("sampled", 60, {"texts": [HOSTILE]}),
        Event("warned", 60, {"text": HOSTILE}),
    ):
        append_event(run / "journal.jsonl", event)
    (run / "logs" / "rank-0.log").write_text(f"{HOSTILE}\n")
