"""MLflow and trackio have what the journal has, each step once, through kills and resumes; in local
files, read back with their own libraries.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from commands import losses, samecurve, write_config
from samecurve.core.config.sections import Track
from samecurve.core.events import Event
from samecurve.launch.tracker_process import Tracker
from samecurve.observe import read_events
from samecurve.run.directory import Run
from samecurve_products.trackers.tracked_run import FirstValues
from tracked_runs import LOSSES, killed_run, resume, steps, write

# prints a run as JSON: its metrics as [step, value] by name, and more
READERS = {
    "mlflow": """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(f"sqlite:///{sys.argv[1]}/mlflow.db")
runs = client.search_runs([client.get_experiment_by_name("samecurve").experiment_id])
points = {
    name: [[point.step, point.value] for point in client.get_metric_history(run.info.run_id, name)]
    for run in runs for name in run.data.metrics
}
files = [file.path for run in runs for folder in (None, "samples", "pictures")
         for file in client.list_artifacts(run.info.run_id, folder)]
about = [[run.info.run_name, run.info.status, run.data.params["model.hidden_size"]] for run in runs]
print(json.dumps({"points": points, "files": files, "about": about}))
""",
    "trackio": """
import json, sys, os
os.environ["TRACKIO_DIR"] = sys.argv[1]
import trackio
from trackio.sqlite_storage import SQLiteStorage
runs = list(trackio.Api().runs("samecurve"))
points, files = {}, []
for run in runs:
    for row in SQLiteStorage.get_logs("samecurve", run.name, run_id=run.id):
        for name, value in row.items():
            if isinstance(value, float | int) and "/" in name:
                points.setdefault(name, []).append([row["step"], value])
            elif isinstance(value, dict):
                files.append(name)
about = [[run.name, run.config["model.hidden_size"]] for run in runs]
print(json.dumps({"points": points, "files": files, "about": about}))
""",
}
NAMES = list(READERS)


@pytest.fixture
def run(tmp_path: Path, corpus: Path, cache: Path) -> Path:
    return killed_run(tmp_path / "run", corpus, cache)


def needs(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[{name}]'")


def tracked(name: str, run: Path) -> None:
    """Run the tracker as the launcher does, until it has taken everything."""
    Tracker(name, Run(run), Track(mlflow=True, trackio=True)).finish(drain=60)


def kept(name: str, run: Path) -> Mapping[str, Any]:
    """What the library itself reads from the run's files."""
    read = [sys.executable, "-c", READERS[name], str(run / "logs" / name)]
    done = subprocess.run(read, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr + (run / f"logs/{name}.log").read_text()
    content: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


def warnings(run: Path) -> list[str]:
    events = read_events(run / "journal.jsonl")
    return [event.values["text"] for event in events if event.kind == "warned"]


@pytest.mark.parametrize("name", NAMES)
def test_each_step_is_there_once_in_one_run(name: str, run: Path) -> None:
    """Killed at step 12, resumed from 8 with other numbers: the first values stay."""
    needs(name)
    tracked(name, run)
    first = kept(name, run)["points"]
    assert first["train/loss"] == [[step, LOSSES[step]] for step in range(1, 13)]
    assert first["eval/perplexity"] == [[10, 12.18]]
    assert first["sensors/utilisation/0"] == [[9, 0.5], [9, 0.6]]
    assert any("secret.png is left out: it lies outside" in text for text in warnings(run))
    resume(run)
    tracked(name, run)
    both = kept(name, run)
    expected = [[step, LOSSES[step] + (0.5 if step > 12 else 0)] for step in range(1, 14)]
    assert both["points"]["train/loss"] == expected
    assert "has steps 9 to 12 from before and keeps those values" in warnings(run)[-1]
    about = {"mlflow": ["run", "FINISHED", "32"], "trackio": ["run-1a-2", 32]}
    assert both["about"] == [about[name]]
    files = {
        "mlflow": {"config.yaml", "samples/step-00000010-0.txt", "pictures/red.png"},
        "trackio": {"samples/0", "pictures/0"},
    }
    assert files[name] <= set(both["files"])
    assert "pictures/torn.png" not in both["files"]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_what_was_lost_is_written_again(name: str, run: Path) -> None:
    """The tracker's files are gone, or its position is: it begins anew, and no step is twice."""
    needs(name)
    tracked(name, run)
    (run / f"logs/{name}/{name}-local.json").unlink()
    tracked(name, run)
    assert [step for step, _ in kept(name, run)["points"]["train/loss"]] == list(range(1, 13))
    for path in (run / "logs" / name).glob("*.db*"):
        path.unlink()
    write(run, *steps(13, 14))
    tracked(name, run)
    assert [step for step, _ in kept(name, run)["points"]["train/loss"]] == list(range(1, 15))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_that_fails_is_said_and_stops_nothing(name: str, run: Path) -> None:
    """Where it would write there is a file."""
    needs(name)
    (run / "logs" / name).mkdir()
    broken = {"mlflow": "mlflow.db", "trackio": "samecurve.db"}[name]
    (run / "logs" / name / broken).write_text("no database")
    tracked(name, run)
    (warning,) = [text for text in warnings(run) if "training goes on" in text]
    assert warning.startswith({"mlflow": "MLflow: ", "trackio": "trackio: "}[name])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_stopped_and_resumed_is_one_run(
    name: str, tmp_path: Path, corpus: Path
) -> None:
    """As it is typed, on other devices after the stop, without a network: nothing is sent."""
    needs(name)
    config = write_config(tmp_path, corpus, steps=30, save=10)
    common = ["train", "-f", config, "--save-dir", "run", f"--{name}"]
    samecurve(*common, "--devices", "cpu:1", "--stop-after", "12", cwd=tmp_path)
    samecurve(*common, "--devices", "cpu:2", cwd=tmp_path)
    content = kept(name, tmp_path / "run")
    expected = [list(pair) for pair in enumerate(losses(tmp_path / "run"), 1)]
    assert content["points"]["train/loss"] == expected
    assert len(content["about"]) == 1


def test_repeated_steps_are_not_sent_again(run: Path) -> None:
    """Without a library: which events a tracker gets that can't take a value back."""
    first = FirstValues(run, "It", {"sent": 12})
    resumed = Event("resumed", 8)
    taken = [event.step for event in (resumed, *steps(9, 14)) if first.is_new(event)]
    assert taken == [13, 14]
    assert warnings(run)[-1].startswith("It has steps 9 to 12 from before")
    assert FirstValues(run, "It", first.state()).repeated == 12
