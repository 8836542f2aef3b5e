"""The web page as a person uses it, in Chromium: set up a run, watch, stop, resume, compare, queue;
an error beside its field; a failed run's cause; a narrow screen; a report without a network.
"""

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="pip install -e '.[dev]'")

import browsing
from browsing import CHROMIUM, HOSTILE, NARROW, Site, opened, plant_hostile_texts, write_root
from playwright.sync_api import Page, expect

from commands import samecurve
from samecurve.core.config import flatten
from samecurve.core.config.document import read_document
from samecurve.core.config.loading import load_document
from samecurve.observe import read_events
from samecurve.tasks import Tasks

needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason=browsing.MISSING)
STEPS = 400


@pytest.mark.long
def test_there_is_a_browser() -> None:
    """What is skipped in the quick tests without Chromium fails in the long ones."""
    assert CHROMIUM.exists(), browsing.MISSING


def losses(run: Path) -> list[float]:
    events = read_events(run / "journal.jsonl")
    return [event.values["loss"] for event in events if event.kind == "step"]


def new_run(site: Site, batch: str = "batch 10 = 1 device") -> Page:
    """The form of a new run that begins from tiny.yaml, with its plan."""
    site.open("new")
    page = site.page
    page.get_by_role("button", name="A config").click()
    config = page.get_by_role("combobox", name="Begin from")
    config.select_option(label=config.locator("option", has_text="tiny.yaml").inner_text())
    expect(page.get_by_role("complementary", name="Plan")).to_contain_text(batch)
    return page


@needs_chromium
@pytest.mark.long
def test_a_run_is_set_up_watched_stopped_resumed_and_compared(tmp_path: Path, corpus: Path) -> None:
    root = tmp_path / "root"
    config = write_root(root, corpus, STEPS)
    samecurve("train", "-f", config, "--devices", "cpu", "--save-dir", "runs/alone", cwd=root)
    with opened(root) as site:
        page = new_run(site)
        plan = page.get_by_role("complementary", name="Plan")
        page.get_by_label("Enable").check()
        page.get_by_label("CPU ranks").fill("2")
        expect(plan).to_contain_text("batch 10 = 2 devices x 5 x 1 round")
        page.get_by_label("Batch over all devices").fill("12")
        expect(plan).to_contain_text("batch 12 = 2 devices x 6 x 1 round")
        page.get_by_label("Batch over all devices").fill("10")
        expect(plan).to_contain_text("batch 10 = 2 devices")
        expect(plan).to_contain_text("samecurve train -f tiny.yaml")
        page.get_by_label("Name").fill("together")
        page.get_by_role("button", name="Start", exact=True).click()

        page.get_by_role("button", name="Stop", exact=True).wait_for(timeout=60_000)
        legend = page.get_by_role("figure", name="Loss").first
        expect(legend.locator("canvas")).to_be_visible()
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("button", name="Resume").click(timeout=60_000)
        assert (root / "runs").is_dir()
        together = next((root / "runs").glob("together*"))
        stopped_at = len(losses(together))
        assert 0 < stopped_at < STEPS
        page.get_by_role("dialog").get_by_label("CPU ranks").fill("1")
        page.get_by_role("dialog").get_by_role("button", name="Resume").click()
        expect(page.locator(".page-header")).to_contain_text("finished")

        apart = [
            abs(one - two) / one
            for one, two in zip(losses(root / "runs" / "alone"), losses(together), strict=True)
        ]
        assert max(apart) < 1e-9
        plan_now = json.loads((together / "plan.json").read_text())["plan"]
        assert len(plan_now["devices"]) == 1

        site.open("runs")
        boxes = page.get_by_role("row").get_by_role("checkbox")
        expect(boxes).to_have_count(2)
        for box in boxes.all():
            box.check()
        page.get_by_role("button", name="Compare").click()
        overlay = page.get_by_role("figure", name="Loss").first
        expect(overlay).to_contain_text("alone")
        expect(overlay).to_contain_text("together")


@needs_chromium
@pytest.mark.long
def test_queued_jobs_run_in_order_and_after_a_restart_of_the_server(
    tmp_path: Path, corpus: Path
) -> None:
    root = tmp_path / "root"
    write_root(root, corpus, steps=150)
    with opened(root) as site:
        page = new_run(site)
        for name in ("one", "two"):
            page.get_by_label("Name").fill(name)
            page.get_by_role("button", name="Queue", exact=True).click()
            expect(page.get_by_role("heading", name="Runs", exact=True, level=1)).to_be_visible()
            site.open("new")
            expect(page.get_by_role("complementary", name="Plan")).to_contain_text("batch 10 =")
        site.open("runs")
        queue = page.get_by_role("region", name="Queue")
        expect(queue).to_contain_text("two")
        assert len(list((root / "runs").glob("two*"))) == 0
    with opened(root) as site:
        site.open("runs")
        rows = site.page.get_by_role("row")
        for name in ("one", "two"):
            row = rows.filter(has_text=re.compile(rf"\b{name}"))
            expect(row).to_contain_text("finished")
    (one,), (two,) = ((root / "runs").glob(f"{name}*") for name in ("one", "two"))
    ended = read_events(one / "journal.jsonl")[-1]
    began = read_events(two / "journal.jsonl")[0]
    assert (ended.kind, began.kind) == ("finished", "planned")
    assert began.time > ended.time


@pytest.mark.long
@needs_chromium
def test_an_error_stands_beside_its_field(tmp_path: Path, corpus: Path) -> None:
    root = tmp_path / "root"
    write_root(root, corpus, STEPS)
    with opened(root) as site:
        page = new_run(site)
        width = page.get_by_label("Hidden size")
        width.fill("33")
        expect(width).to_have_attribute("aria-invalid", "true")
        about = str(width.get_attribute("aria-describedby"))
        wrong = " ".join(page.locator(f"[id='{part}']").inner_text() for part in about.split())
        assert "33 is not a multiple of num_heads 4" in wrong
        expect(page.get_by_role("button", name="Start", exact=True)).to_be_disabled()
        width.fill("32")
        expect(page.get_by_role("button", name="Start", exact=True)).to_be_enabled()
        page.get_by_label("Learning rate", exact=True).fill("fast")
        expect(page.get_by_label("Learning rate", exact=True)).to_have_attribute(
            "aria-invalid", "true"
        )


EVERY_KIND = """\
task: language
model: {hidden_size: 32, num_layers: 1, num_heads: 2, max_seq_len: 16, tie_embeddings: true}
data: {source: squares.txt, prompts: ["the "]}
batch: {samples: 8}
optimizer: {name: adamw, lr: 0.002, betas: [0.8, 0.9], groups: [{match: "layers.*", lr_scale: 0.5}]}
track: {experiment: mine}
devices: {use: cpu, memory: 2GiB}
train: {steps: 20, eval_every: 5, seed: 1, early_stop: {metric: loss, patience: 4}}
"""
# one field of each kind: key, what the base shows, what is set instead, as the saved file has it
Row = tuple[str, Any, Any, Any]
FIELDS: tuple[Row, ...] = (
    ("optimizer.lr", "0.002", "0.001", 0.001),  # number
    ("train.seed", "1", "9007199254740993", 2**53 + 1),  # integer, beyond what JavaScript counts
    ("track.experiment", "mine", "yours", "yours"),  # text
    ("optimizer.name", "adamw", "muon", "muon"),  # choice
    ("model.tie_embeddings", True, False, False),  # switch
    ("train.early_stop", True, False, None),  # switch of a section
    ("data.prompts", "the ", " a: b\n# c", [" a: b", "# c"]),  # list
    ("optimizer.betas", "0.8, 0.9", "0.7, 0.9", (0.7, 0.9)),  # list of numbers
    ("optimizer.groups", '[{"match": "layers.*", "lr_scale": 0.5}]', "[]", ()),  # json
    ("data.source", "squares.txt", "other.txt", "other.txt"),  # path
    ("train.steps", "20", "2ep", "2ep"),  # duration
    ("devices.memory", "2GiB", "3GiB", 3 << 30),  # size
    ("devices.strategy", "auto", "ddp", "ddp"),  # of several devices
)


def set_field(page: Page, key: str, value: object) -> None:
    """Set a control as a user does, by another value where it shows this one already."""
    control = page.locator(f"[data-key='{key}'] [name='{key}']")
    if isinstance(value, bool):
        control.set_checked(not value)
        control.set_checked(value)
    elif control.evaluate("control => control.tagName") == "SELECT":
        other = control.locator("option").evaluate_all("all => all.map(one => one.value)")
        control.select_option(next(one for one in other if one != value))
        control.select_option(str(value))
    else:
        control.fill(f"{value}0")
        control.fill(str(value))


def shown(page: Page, key: str) -> object:
    control = page.locator(f"[data-key='{key}'] [name='{key}']")
    return control.evaluate("one => one.type === 'checkbox' ? one.checked : one.value")


def saved(page: Page, name: str, root: Path) -> dict[str, Any]:
    """The config that Save as YAML writes; a value that it leaves out is None."""
    page.get_by_label("Name").fill(name)
    page.get_by_role("button", name="Save as YAML").click()
    page.get_by_text(f"Saved as configs/{name}.yaml").wait_for()
    config = load_document(read_document(root / "configs" / f"{name}.yaml"), Tasks()).config
    return flatten(config)


def all_shown(page: Page, keys: Iterable[str]) -> dict[str, object]:
    page.locator("details.more").evaluate("more => more.open = true")
    return {key: shown(page, key) for key in keys}


SHARPEST = {"train.seed", "train.early_stop", "data.prompts"}  # in make test: not just a text


@needs_chromium
@pytest.mark.parametrize(
    ("fields", "rounds"),
    [
        ([row for row in FIELDS if row[0] in SHARPEST], [1]),
        pytest.param(FIELDS, [0, 1], marks=pytest.mark.long),
    ],
    ids=["some", "every kind"],
)
def test_what_a_new_run_shows_is_what_it_sends(
    fields: Sequence[Row], rounds: list[int], tmp_path: Path, corpus: Path
) -> None:
    """Fields are set, and set to the same again after a return and a reload."""
    root = tmp_path / "root"
    write_root(root, corpus, STEPS)
    (root / "other.txt").write_text(corpus.read_text())
    (root / "tiny.yaml").write_text(EVERY_KIND)
    kept = load_document(read_document(root / "tiny.yaml"), Tasks()).config
    begun, set_to, wanted = ({row[0]: row[at] for row in fields} for at in (1, 2, 3))
    with opened(root) as site:
        page = new_run(site, batch="batch 8 = 1 device")
        page.get_by_label("Enable").check()
        assert all_shown(page, begun) == begun
        for key, value in set_to.items():
            set_field(page, key, value)
        for number in rounds:
            site.open("runs")
            if number:
                page.reload()
            site.open("new")
            page.get_by_label("Enable").wait_for()
            assert all_shown(page, set_to) == set_to
            for key, value in set_to.items():
                set_field(page, key, value)
            has = saved(page, f"changed-{number}", root)
            assert {key: has.get(key, "a section") for key in wanted} == wanted
        momentum = page.get_by_label("Momentum")  # which follows from the optimizer
        if "optimizer.name" in begun:
            expect(momentum).to_have_value("0.95")
        for key, value in begun.items():
            set_field(page, key, value)
        expect(momentum).to_have_value("0.9")
        page.get_by_label("Enable").uncheck()
        assert saved(page, "as-before", root) == flatten(kept)
        assert page.locator("[aria-invalid]").count() == 0


@needs_chromium
def test_every_page_shows_hostile_texts_as_texts_and_fits_a_narrow_screen(
    tmp_path: Path, unbroken_run: Path
) -> None:
    root = tmp_path / "root"
    run = root / "runs" / HOSTILE.replace("/", "_")
    shutil.copytree(unbroken_run, run)
    plant_hostile_texts(run)
    failed = root / "runs" / "failed"
    shutil.copytree(unbroken_run, failed)
    with open(failed / "journal.jsonl", "a") as file:
        values = {"cause": "rank 1 lacked memory", "remedy": "--batch-size 4 needs half"}
        file.write(json.dumps({"time": 2e9, "step": 60, "kind": "failed", **values}) + "\n")
    with opened(root, NARROW) as site:
        run_id, failed_id = site.run_id(run.name), site.run_id("failed")
        tabs = ("curves", "devices", "samples", "logs", "plan")
        for place in (
            *("new", "data", "runs", "machine", f"compare?runs={run_id},{failed_id}"),
            *(f"run/{run_id}?tab={tab}" for tab in tabs),
        ):
            site.open(place)
            expect(site.page.get_by_role("heading", level=1)).to_be_visible()
            site.settle()
            width = site.page.evaluate("document.documentElement.scrollWidth")
            assert width <= NARROW["width"], place
            assert site.page.evaluate("document.title") != "broken"
            if "samples" in place or "logs" in place:
                texts = site.page.get_by_text(HOSTILE).filter(visible=True)
                expect(texts.first).to_be_visible()
        site.open(f"run/{failed_id}")
        first = site.page.locator(".note").first
        expect(first).to_contain_text("rank 1 lacked memory")
        expect(first).to_contain_text("--batch-size 4 needs half")


@pytest.mark.long
@needs_chromium
def test_a_report_is_read_from_disk_without_a_network(tmp_path: Path, unbroken_run: Path) -> None:
    run = tmp_path / HOSTILE.replace("/", "_")
    shutil.copytree(unbroken_run, run)
    plant_hostile_texts(run)
    samecurve("report", run, unbroken_run, "--to", "both.html", cwd=tmp_path)
    samecurve("report", run, cwd=tmp_path)
    complaints: list[str] = []
    with browsing.browser(offline=True) as context:
        for file in (run / "report.html", tmp_path / "both.html"):
            page = context.new_page()
            asked = browsing.watch_requests(page)
            browsing.watch_complaints(page, complaints)
            page.goto(file.as_uri())
            loss = page.get_by_role("figure", name="Loss").first
            expect(loss.locator("canvas")).to_be_visible()
            loss.locator(".u-over").hover()
            expect(loss).to_contain_text(re.compile(r"step \d+"))
            assert page.evaluate("document.title") != "broken"
            assert len(asked) == 1
            page.close()
    assert not complaints
