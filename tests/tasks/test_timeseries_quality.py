"""models/har.yaml on its synthetic set: how well, how soon, and how far a linear classifier stays
behind.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from commands import samecurve
from samecurve.core.config.document import read_document
from samecurve.observe import read_events
from samecurve_products.sensors.sections import TimeSeriesData, TimeSeriesModel
from samecurve_products.sensors.synthetic import VERSION
from samecurve_products.sensors.task import TimeSeriesTask

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.long


def linear_accuracy(task: TimeSeriesTask) -> float:
    """On the test split, of the best of several strengths of regularisation, chosen there: what no
    linear classifier that is chosen honestly would beat by much.
    """
    train, test = (every(rows) for rows in (task.train_data(), task.test_data()))
    scores = []
    for strength in (1e-4, 1e-3, 1e-2, 1e-1):
        linear = LogisticRegression(C=strength, max_iter=2000)
        linear.fit(train["x"].reshape(len(train["x"]), -1), train["label"])
        scores.append(linear.score(test["x"].reshape(len(test["x"]), -1), test["label"]))
    return float(max(scores))


def every(rows: Any) -> dict[str, np.ndarray[Any, Any]]:
    return dict(rows[np.arange(len(rows))])


def test_more_than_95_percent_in_two_minutes_where_a_linear_classifier_has_less_than_65(
    cache: Path, tmp_path: Path
) -> None:
    """On two CPU ranks, the making of the set included; on people that nothing was chosen by."""
    shutil.rmtree(cache / "timeseries", ignore_errors=True)
    begin = time.monotonic()
    line = ("train", "-f", ROOT / "models/har.yaml", "--devices", "cpu:2", "--save-dir", "run")
    done = samecurve(*line, cwd=tmp_path, timeout=300)
    seconds = time.monotonic() - begin
    assert "no data.source: a synthetic set, made once in the cache" in done.stdout
    place = cache / f"timeseries/synthetic-{VERSION}"
    results = json.loads((tmp_path / "run/results.json").read_text())
    accuracy = results["test"]["accuracy"]
    of_newest = [
        json.loads(samecurve("eval", "run", *which, "--json", cwd=tmp_path).stdout)
        for which in (("--on", "test"), ("-d", place / "test"))
    ]
    fields = dict(read_document(ROOT / "models/har.yaml").value["data"])
    fields["augment"] = TimeSeriesData().augment
    linear = linear_accuracy(TimeSeriesTask(TimeSeriesModel(), TimeSeriesData(**fields), cache))
    events = read_events(tmp_path / "run/journal.jsonl")
    curve = [event.values["accuracy"] for event in events if event.kind == "evaluated"]
    print(f"{seconds:.0f} s, test accuracy {accuracy:.4f}, linear {linear:.4f}, curve {curve}")
    assert seconds < 120
    assert of_newest[0]["accuracy"] == of_newest[1]["accuracy"] > 0.95
    assert of_newest[0]["confusion"] == of_newest[1]["confusion"]
    assert accuracy > 0.95
    assert linear < 0.65
