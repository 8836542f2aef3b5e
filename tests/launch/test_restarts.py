"""What the next start of a run that failed goes on from."""

from dataclasses import replace
from pathlib import Path

from samecurve.checkpoint.store import checkpoints
from samecurve.errors import RunError, UserError
from samecurve.launch.local import is_refusal
from samecurve.launch.restarts import RestartBudget, prepare_restart
from samecurve.observe import read_events
from samecurve.run.start_files import PreparedRun
from starts import start, train, values
from worlds import Pool


def test_a_damaged_checkpoint_is_out_of_the_way_of_what_the_next_start_saves(
    pool: Pool, tmp_path: Path, corpus: Path, cache: Path
) -> None:
    """One is kept, and that one is damaged: the run begins anew, and keeps what it saves."""
    config = values(corpus, train={"steps": 6, "save_every": 2, "keep": 1, "precision": "f64"})
    prepared = start(tmp_path / "run", config, cache)
    train(pool, prepared)
    (only,) = checkpoints(prepared.run.checkpoints)
    file = only / "rank-0-of-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    following = prepare_restart(prepared, RunError("killed", again=True), 0.0, RestartBudget(1))
    assert isinstance(following, PreparedRun)
    events = read_events(following.run.journal)
    warned = [event.values["text"] for event in events if event.kind == "warned"][-2:]
    assert warned[0].startswith("checkpoint step-00000006 is damaged: ")
    assert warned[1].startswith("step-00000006 lies beyond where this goes on from: set aside as")
    train(pool, replace(following, attempt=replace(following.attempt, stop_at=4)))
    assert [path.name for path in checkpoints(prepared.run.checkpoints)] == ["step-00000004"]


def test_a_run_that_has_trained_is_no_refusal(
    pool: Pool, tmp_path: Path, corpus: Path, cache: Path
) -> None:
    """A later start of the same command may fail for the user's reason: what was saved stays."""
    config = values(corpus, train={"steps": 4, "save_every": 2, "precision": "f64"})
    prepared = start(tmp_path / "run", config, cache)
    assert is_refusal(prepared, UserError("a loss that mixes samples", "its line"))
    train(pool, prepared)
    following = prepare_restart(prepared, RunError("killed", again=True), 0.0, RestartBudget(1))
    assert isinstance(following, PreparedRun)
    assert not is_refusal(following, UserError("a loss that mixes samples", "its line"))
