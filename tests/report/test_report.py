"""A report says what the run's files say, keeps every spike, lets nothing of a run become markup,
and refuses what it can't honour before it writes.
"""

import json
import math
import os
import shutil
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from commands import refused, samecurve, write_config
from frozen_page import decoded, read_page
from samecurve.cli.main import main
from samecurve.core.events import Event
from samecurve.core.system.installation import install_command
from samecurve.errors import RunError, UserError
from samecurve.observe import append_event, line_of, read_events
from samecurve_products.report.compare.compare_runs import bits_lines
from samecurve_products.report.reading import read_run
from samecurve_products.report.record import RunRecord
from samecurve_products.report.summary import differences, outcome, summary
from samecurve_products.report.write_report import write_report


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """`one` was left at step 25 and gone on with; `two` has another learning rate and batch."""
    home = tmp_path_factory.mktemp("reported")
    config = write_config(home, corpus, steps=40)
    for more in (
        ("--save-dir", "one", "--stop-after", "25"),
        ("--save-dir", "one"),
        ("--save-dir", "two", "--lr", "1e-3", "--global-batch", "8", "--max-steps", "20"),
    ):
        samecurve(
            "train",
            "-f",
            config,
            "--devices",
            "cpu",
            "--set",
            "track.sensors_every=0",
            *more,
            cwd=home,
        )  # a slow run would have lines of them, which tests lay in themselves
    return home


def copied(home: Path, to: Path) -> Path:
    return Path(shutil.copytree(home / "one", to))


def test_the_page_of_a_run_says_what_its_files_say(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)

    def samecurve(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["samecurve", *arguments])
        main()
        return capsys.readouterr().out

    pytest.importorskip("matplotlib", reason="pip install -e '.[report]'")
    assert samecurve("report", "one").split() == ["one/report.html"]
    paths = samecurve("report", "one", "--png").split()
    events = read_events(home / "one" / "journal.jsonl")
    page = read_page(home / paths[0])
    plan = json.loads((home / "one" / "plan.json").read_text())["plan"]
    resumed = next(event for event in events if event.kind == "resumed")
    for text in [
        *plan["because"].values(),
        resumed.values["text"],
        *next(event for event in reversed(events) if event.kind == "sampled").values["texts"],
        "finished",
        "versions.torch",
    ]:
        assert text in page.text, text
    assert {
        "report.html",
        "report-loss.png",
        "report-memory.png",
        "report-time.png",
        "report-metric-perplexity.png",
    } <= {Path(path).name for path in paths}
    assert all((home / path).read_bytes().startswith(b"\x89PNG") for path in paths[1:])
    assert not [path for path in (home / "one").iterdir() if path.name.endswith(".part")]

    (numbers,) = json.loads(samecurve("report", "one", "--json"))["runs"]
    losses = [event.values["loss"] for event in events if event.kind == "step"]
    arrays = page.page["runs"][0]["columns"]["arrays"]
    assert decoded(arrays["step"]) == list(range(1, 41))
    assert decoded(arrays["loss"]) == pytest.approx(losses, rel=1e-6)
    best = min((event.values["loss"], event.step) for event in events if event.kind == "evaluated")
    assert (numbers["outcome"], numbers["step"], numbers["starts"], numbers["loss"]) == (
        "finished",
        40,
        2,
        losses[-1],
    )
    assert (numbers["best_loss"], numbers["best_step"]) == best
    assert numbers["memory_bytes"] == max(
        event.values["memory_bytes"] for event in events if event.kind == "step" and event.step > 25
    )
    assert numbers["seconds_by_use"]["evaluating"] == pytest.approx(
        sum(event.values["seconds"] for event in events if event.kind == "evaluated")
    )


def test_runs_compared_differ_in_what_was_asked_and_nothing_else(
    home: Path, tmp_path: Path
) -> None:
    records = [read_run(home / name, live=False) for name in ("one", "two")]
    parts = differences(records)
    assert parts["config"] == {
        "batch.samples": [10, 8],
        "optimizer.lr": [3e-3, 1e-3],
        "train.steps": [40, 20],
    }
    assert parts["environment"] == {}
    assert {"batch", "lr", "steps"} <= parts["plan"].keys()
    assert not {"strategy", "precision", "seed", "data", "threads"} & parts["plan"].keys()
    plan = records[1].plan
    assert plan is not None
    assert summary(records[1])["samples_seen"] == sum(
        plan.order.position(step).count for step in range(20)
    )  # short steps end an epoch
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "report-old.png").write_bytes(
        b"\x89PNG samecurve report"
    )  # of an earlier report
    written = write_report(records, tmp_path / "both", pictures=True)
    page = read_page(written[0])
    assert {path.name for path in written} >= {
        "report-loss.png",
        "report-loss-time.png",
        "report-loss-samples.png",
    }
    assert "optimizer.lr" in page.text
    assert "optimizer.weight_decay" not in page.text
    assert {path.name for path in (tmp_path / "both").iterdir()} == {path.name for path in written}
    for run in page.page["runs"]:
        assert {"step", "samples", "tokens", "seconds", "wall"} <= run["columns"]["arrays"].keys()
    loss = page.named("chart")["loss"]
    assert [line["run"] for line in loss["lines"]] == [0, 1, 0, 1]  # and their validation


def test_nothing_that_a_run_says_becomes_markup(home: Path, tmp_path: Path) -> None:
    evil = (
        "<script>alert(1)</script>\"'><img src=x onerror=alert(1)> $\\frac{ \ud800 \u202e \x1b[2J"
    )
    run = copied(home, tmp_path / "_<b>$x^2$&")
    for event in (
        Event("sampled", 40, {"texts": [evil], "pictures": ["../../x.png", evil, "\x00"]}),
        Event("warned", 40, {"text": evil}),
        Event(
            "evaluated",
            40,
            {"loss": 1.0, evil: 2.0, "../../x": 3.0, "..//x": 3.5, "best_loss": [evil]},
        ),
        Event(
            "step",
            41,
            {
                "loss": evil,
                "lr": [1],
                "seconds": 1e308,
                "samples_per_second": 1e308,
                "memory_bytes": -1e300,
                "wait_seconds": True,
            },
        ),
        Event(
            "sensors",
            41,
            {"utilisation_by_device": [evil, 0.5, None], "power_watts_by_device": evil},
        ),
        Event("sensors", 41, {"utilisation_by_device": [None, 0.25]}),
        Event("failed", 41, {"cause": evil, "remedy": evil}),
    ):
        append_event(run / "journal.jsonl", event)
    with open(run / "journal.jsonl", "ab") as file:
        file.write(
            b'{"kind": [], "step": 1, "time": 1}\n{"kind": "step", "step": Infinity, "time":'
            b' 1}\n{"kind": "step", "step": 1, "time": NaN}\n\xff\xfe\n'
            + b"[" * 100_000
            + b"\n[1]\n"
        )
    plan = json.loads((run / "plan.json").read_text())
    plan["plan"]["because"]["lr"] = plan["plan"]["devices"][0]["name"] = plan["formulas"][
        "flops"
    ] = plan["origins"]["optimizer.lr"] = evil
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text() + f"note: {json.dumps(evil)}\n"
    )
    record = read_run(run, live=False)
    written = write_report([record], None)[0]
    page = read_page(written)
    assert summary(record)["utilisation_mean"] == 0.375
    assert page.text.count("<script>alert(1)</script>") >= 6
    assert not set("\ud800\u202e\x1b\u2028") & set(page.text)
    assert written.read_text().isascii() or "\u2028" not in written.read_text()
    assert "6 lines passed over" in page.text
    assert not [path for path in tmp_path.iterdir() if path != run]


def test_every_state_of_a_run_has_a_page_that_says_so(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install -e '.[report]'")
    lines = (home / "one" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    trained = kinds.index("step")

    def page(name: str, journal: bytes, *, live: bool = False) -> tuple[RunRecord, str]:
        run = copied(home, tmp_path / name)
        (run / "journal.jsonl").write_bytes(journal)
        record = read_run(run, live=live)
        return record, read_page(write_report([record], tmp_path / f"{name}.html")[0]).text

    killed, text = page("killed", b"".join(lines[: trained + 7]) + lines[trained + 7][:30])
    assert (outcome(killed), summary(killed)["step"]) == ("cut off", 7)
    assert "killed, or the machine went down" in text
    assert "never evaluated" in text
    assert "1 line passed over" in text
    live, text = page("live", lines[0], live=True)
    assert (outcome(live), live.faults) == ("running", [])
    assert "No step was trained" in text
    assert "no numbers for it: loss" in text
    written = write_report([live], None, pictures=True)
    assert [path.name for path in written] == ["report.html", "report-memory.png"]


def test_a_page_goes_to_the_file_that_was_named(home: Path, tmp_path: Path) -> None:
    """Nothing is put beside it, unless pictures are asked for."""
    record = read_run(home / "one", live=False)
    page = tmp_path / "pages" / "x.html"
    assert write_report([record], page) == [page]
    assert [path.name for path in page.parent.iterdir()] == ["x.html"]
    assert read_page(page).page["runs"]
    (page.parent / "report-loss.png").write_bytes(b"somebody's own")
    assert write_report([record], page) == [page]
    other = tmp_path / "other.html"
    other.write_text("somebody's own")
    with pytest.raises(UserError, match="was not written by samecurve report"):
        write_report([record], other)
    with pytest.raises(UserError, match=r"report-loss\.png was not written"):
        write_report([record], page, pictures=True)


def test_steps_that_were_done_again_count_once(home: Path, tmp_path: Path) -> None:
    """Killed after a save: the steps beyond it are trained again, by a second start."""
    run = copied(home, tmp_path / "again")
    uninterrupted = summary(read_run(run, live=False))
    append_event(run / "journal.jsonl", Event("planned", 20, {"plan": {}}))
    append_event(run / "journal.jsonl", Event("resumed", 20, {"text": "from a save"}))
    record = read_run(run, live=False)
    assert (len(record.steps), record.totals.voided_steps, outcome(record)) == (20, 20, "cut off")
    assert [event.step for event in record.evaluated] == [20]
    numbers = summary(record)
    seconds = numbers["training_seconds"] + numbers["seconds_by_use"]["steps done again"]
    assert seconds == pytest.approx(uninterrupted["training_seconds"])
    goodput, goodput_before = numbers["goodput"], uninterrupted["goodput"]
    assert goodput is not None
    assert goodput_before is not None
    assert goodput < goodput_before


def test_a_damaged_plan_is_named_and_the_journals_taken(home: Path, tmp_path: Path) -> None:
    run = copied(home, tmp_path / "run")
    (run / "plan.json").write_text('{"plan"')
    (run / "config.yaml").write_bytes(b"\xff\xfe\x00")
    record = read_run(run, live=False)
    assert record.plan is not None
    assert [fault.split(" can't be read")[0] for fault in record.faults] == [
        "plan.json",
        "config.yaml",
    ]
    damages: list[dict[str, Any]] = [
        {"because": {}},
        {"batch": 1 << 60},
        {"devices": []},
        {"micro": 0},
    ]
    for damage in damages:
        plan = json.loads((home / "one" / "plan.json").read_text())
        plan["plan"] |= damage
        (run / "plan.json").write_text(json.dumps(plan))
        record = read_run(run, live=False)
        assert record.plan is None
        assert "of another version of samecurve, or damaged" in record.faults[0]
        assert write_report([record], tmp_path / "damaged.html")
    (run / "plan.json").write_text('{"plan"')
    (run / "journal.jsonl").unlink()
    with pytest.raises(RunError, match=r"plan\.json can't be read"):
        read_run(run, live=False)


def test_losses_of_any_size_are_gaps_where_they_cant_be_drawn(home: Path, tmp_path: Path) -> None:
    """A page's numbers are float32, and matplotlib's arithmetic ends at 1e100; sums don't."""
    pytest.importorskip("matplotlib", reason="pip install -e '.[report]'")
    run = copied(home, tmp_path / "run")
    journal = run / "journal.jsonl"
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    extremes = [1e308, -1e308, 1.7e308, -1.7e308, 5e-324]
    for event, value in zip((e for e in events if e["kind"] == "step"), extremes, strict=False):
        event["loss"] = event["grad_norm"] = event["memory_bytes"] = value
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))
    page = read_page(write_report([read_run(run, live=False)], None, pictures=True)[0])
    loss = decoded(page.page["runs"][0]["columns"]["arrays"]["loss"])
    assert [math.isnan(value) for value in loss[:6]] == [True] * 4 + [False] * 2


def test_a_journal_of_any_size_is_read_in_its_own_time(home: Path, tmp_path: Path) -> None:
    """Each line goes back, and names a metric of its own: squares of what it holds were kept."""
    run = copied(home, tmp_path / "run")
    (run / "report.html").unlink(missing_ok=True)
    os.mkfifo(run / "report.html")
    with open(run / "journal.jsonl", "ab") as file:
        for number in range(4_000):
            metrics = {f"m{number}": 1.0}
            step = {"seconds": 1.0, "wait_seconds": 0.0, "loss": 1.0, "metrics": metrics}
            file.write(line_of(Event("step", 41, step)).encode())
            file.write(line_of(Event("resumed", 41 - (number % 100 == 0), {})).encode())
    tracemalloc.start()
    record = read_run(run, live=False)
    assert [event for event in read_events(run / "journal.jsonl") if event.kind == "evaluated"]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 << 20
    assert len(record.steps.means) < 200
    with pytest.raises(UserError, match="was not written by samecurve report"):
        write_report([record], None)


def test_refusals_come_before_anything_is_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(home, tmp_path / "run")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "report.html").write_text("mine")
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def no(*arguments: str) -> str:
        return refused(monkeypatch, capsys, "report", *arguments, cwd=tmp_path)

    assert "nowhere does not exist" in no("run", "nowhere")
    assert "it lies in the run" in no("run/checkpoints")
    assert "runs lie in it: run" in no(".")
    assert "run/../run is named twice" in no("run", "run/../run")
    assert "else/report.html was not written by samecurve report" in no("run", "--to", "else")
    assert "is no directory" in no("run", "--to", "run/plan.json")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert install_command("report") in no("run", "--png")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_exact_runs_say_where_they_part(home: Path, tmp_path: Path) -> None:
    runs = [copied(home, tmp_path / name) for name in ("a", "b")]
    assert bits_lines([read_run(run, live=False) for run in runs]) == []
    for run in runs:
        plan = json.loads((run / "plan.json").read_text())
        plan["plan"]["exact"], plan["plan"]["because"]["exact"] = True, "asked for"
        (run / "plan.json").write_text(json.dumps(plan))
    lines = (runs[1] / "journal.jsonl").read_text().splitlines()
    values = json.loads(lines[-1 - [json.loads(x)["kind"] for x in lines[::-1]].index("step")])
    values["loss"] += 1e-9
    with open(runs[1] / "journal.jsonl", "a") as file:
        file.write(json.dumps(values) + "\n")
    records = [read_run(run, live=False) for run in runs]
    bits = bits_lines(records)
    page = read_page(write_report(records, tmp_path / "both.html", bits=bits)[0])
    assert f"differ step {values['step']}: loss " in page.text
    assert bits_lines(records[:1]) == []
