"""The pictures of the web page in docs/: made from real runs, in Chromium.

Run: PYTHONPATH=tests:tests/ui python tests/ui/pictures.py [DIR] (docs/ if not given). Look at
them before you commit them.
"""

import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from browsing import Site, opened
from PIL import Image
from playwright.sync_api import Page

from commands import samecurve

ROOT = Path(__file__).parents[2]
_COLOURS = 128  # of a picture's palette: a fifth of the bytes, and no difference to the eye
_SIZE = {"width": 1180, "height": 820}


def make_runs(home: Path) -> None:
    """Two runs of one config: one moved from two ranks to one, the other stayed on one."""
    shutil.copy(ROOT / "models" / "tiny.yaml", home)
    train = ("train", "-f", "tiny.yaml", "--set", "track.sensors_every=1")
    moved = (*train, "--save-dir", "runs/moved")
    samecurve(*moved, "--devices", "cpu:2", "--stop-after", "80", cwd=home)
    samecurve(*moved, "--devices", "cpu:1", cwd=home)
    samecurve(*train, "--save-dir", "runs/one-device", "--devices", "cpu:1", cwd=home)


def save(page: Page, path: Path) -> None:
    """A picture of what the window shows, with few colours."""
    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shown.quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}  {path.stat().st_size / 1e3:.0f} kB")


def take(site: Site, to: Path) -> None:
    page = site.page
    site.open(f"compare?runs={site.run_id('moved')},{site.run_id('one-device')}")
    site.settle()
    page.wait_for_timeout(800)
    save(page, to / "ui-compare.png")
    site.open("new")
    page.get_by_role("button", name="Train a small language model").click()
    page.get_by_label("Enable").check()
    page.get_by_label("CPU ranks").fill("2")
    page.get_by_text("batch 32 = 2 devices").first.wait_for()
    page.wait_for_timeout(500)
    save(page, to / "ui-new.png")


def main(to: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "work"
        home.mkdir()
        os.environ["SAMECURVE_CACHE"] = f"{scratch}/cache"
        make_runs(home)
        with opened(home, _SIZE) as site:
            take(site, to)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
