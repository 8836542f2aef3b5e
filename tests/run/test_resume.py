"""What may not change under a run, and what is noted of a change."""

from pathlib import Path
from typing import Any

from samecurve.core.config.document import Document, dump
from samecurve.core.config.sections import Config, load
from samecurve.run.directory import Run
from samecurve.run.resume import Origin, refuse_changes
from samecurve.tasks import Tasks

GROUPS = [{"match": "embed*", "freeze": True}, {"match": "*norm*", "lr_scale": 0.5}]


def config_with(groups: list[dict[str, Any]]) -> Config:
    values = {
        "task": "language",
        "data": {"source": "a.txt"},
        "batch": {"samples": 8},
        "optimizer": {"groups": groups},
    }
    return load(Document(values), Tasks()).config


def never_saved(home: Path, config: Config) -> Origin:
    """A run that was started with this config and ended before its first save."""
    run = Run(home)
    run.config.write_text(dump(config.model_dump(mode="json")))
    return Origin(run)


def test_a_run_that_never_saved_notes_no_change_of_its_own_config(tmp_path: Path) -> None:
    """Read from config.yaml, its tuples are tuples; from a manifest they would be lists."""
    origin = never_saved(tmp_path, config_with(GROUPS))
    refuse_changes(origin, config_with(GROUPS))
    assert origin.notes == []


def test_and_notes_one_that_was_made(tmp_path: Path) -> None:
    origin = never_saved(tmp_path, config_with(GROUPS))
    refuse_changes(origin, config_with(GROUPS[1:]))
    [note] = origin.notes
    assert note.startswith("changed since the run was last saved: optimizer.groups [{'match'")
