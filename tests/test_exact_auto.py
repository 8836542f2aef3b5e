"""train.exact: auto on real ranks: one hash where the plan takes it, and resumes that keep it."""

from pathlib import Path
from typing import Any

from samecurve.checkpoint.manifest import read_manifest
from tiny import Outcome, TinyRun, tiny_values, train_tiny
from worlds import Pool

STEPS = 6


def values(corpus: Path, use: str, strategy: str = "auto", **train: Any) -> dict[str, Any]:
    """A model with enough work in a microbatch: ten samples of 256 tokens, in two of them."""
    return tiny_values(
        corpus,
        model={"hidden_size": 64, "max_seq_len": 256},
        train={
            "steps": STEPS,
            "precision": "f32",
            "hash_every": 2,
            "exact_devices": 2,
            "save_every": 2,
            **train,
        },
        devices={"use": use, "strategy": strategy, "threads": 1},
    )


def test_auto_gives_one_hash_and_a_resume_keeps_it(
    pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    def train(name: str, world: int, config: dict[str, Any], resume: Path | None = None) -> Outcome:
        tiny = TinyRun(tmp_path / name, config, cache, resume=resume)
        outcome: Outcome = pool.run(world, train_tiny, tiny)[0]
        return outcome

    one = train("one", 1, values(corpus, "cpu:1"))
    assert one.plan.reasons["exact_auto"] == "the same bits on up to 2 devices"
    assert sorted(one.hashes) == [2, 4, 6]
    two = train("two", 2, values(corpus, "cpu:2"))
    assert (two.hashes, two.losses) == (one.hashes, one.losses)
    (saved,) = (tmp_path / "one" / "checkpoints").glob("step-*4")
    assert read_manifest(saved)["fixed"]["exact"]
    # threads, and what its cost is now foreseen to be, no longer matter
    later = {**values(corpus, "cpu:2", "fsdp"), "devices": {"use": "cpu:2", "strategy": "fsdp"}}
    moved = train("moved", 2, later, resume=saved)
    assert moved.plan.reasons["exact_auto"].endswith("as this run began")
    assert moved.hashes[6] == one.hashes[6]
    ordinary = train("ordinary", 2, values(corpus, "cpu:2", exact=False))
    assert not ordinary.hashes
    assert ordinary.losses != one.losses
