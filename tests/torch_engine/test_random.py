"""Random numbers in code that nobody changed: they follow the sample, or the step."""

from pathlib import Path

from samecurve.core.config.document import Document
from samecurve.core.config.sections import Config, load
from samecurve.experiments.layout_runner import LayoutRunner
from samecurve.experiments.layouts import parse_layout
from samecurve.experiments.verdicts import compare_layouts
from samecurve.tasks import Tasks, open_task
from tiny import MACHINE
from worlds import Pool

HERE = Path(__file__).parent


def drawing(task: str = "Draws", **sections: object) -> Config:
    values = {
        "task": f"{HERE}/drawing.py:{task}",
        "batch": {"samples": 10},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 6, "precision": "f64", "eval_every": 3},
        **sections,
    }
    return load(Document(values), Tasks()).config


def test_all_that_draws_is_one_curve(pool: Pool, tmp_path: Path) -> None:
    """Functions, methods, names, distributions, recurrent layers and attention, in the loss and in
    the model, computed again in backward; on any devices, in any microbatches.
    """
    config = drawing()
    runner = LayoutRunner(
        config,
        MACHINE,
        open_task(config, "").facts(),
        steps=6,
        kind="cpu",
        pool=pool,
        home=tmp_path,
    )
    layouts = ["single/3", "dp:2", "ddp:3", "fsdp:2", "ddp:2/2"]
    verdicts = list(compare_layouts(runner, [parse_layout(layout) for layout in layouts], 1e-12))
    assert [verdict.verdict for verdict in verdicts] == ["PASS"] * len(layouts), verdicts
