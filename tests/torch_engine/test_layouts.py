"""What strategies must get right beyond the plain case: complex weights, batch statistics, frozen
and unused parameters, dropout, half precision.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from one_curve import check_one_curve
from rank_runs import train_on_ranks
from samecurve.core.config.document import Document, read_document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.planner import plan
from samecurve.tasks import Tasks, open_task
from tiny import MACHINE, TinyRun, tiny_values, train_tiny
from worlds import Pool

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"


def small(**sections: Any) -> Config:
    values = {
        "task": f"{HERE}/layouts.py:Small",
        "batch": {"samples": 10},
        "optimizer": {"lr": 1e-2},
        **sections,
    }
    values["train"] = {"steps": 12, "precision": "f64", **sections.get("train", {})}
    return load_document(Document(values), Tasks()).config


def trained(pool: Pool, home: Path, config: Config, strategy: str, world: int) -> list[float]:
    devices = config.devices.model_copy(update={"use": f"cpu:{world}", "strategy": strategy})
    config = config.model_copy(update={"devices": devices})
    made = plan(config, MACHINE, open_task(config, "").facts())
    events = train_on_ranks(pool, home, config, made)
    return [event.values["loss"] for event in events if event.kind == "step"]


@pytest.mark.parametrize(
    "example",
    ["batchnorm", *(pytest.param(name, marks=pytest.mark.long) for name in ("fft", "ragged"))],
)
@pytest.mark.parametrize(
    "layouts",
    [
        ["dp:3", "fsdp:3..ddp:4"],
        pytest.param(["ddp:3", "fsdp:2", "hsdp:4", "fsdp:3..dp:2..ddp:4"], marks=pytest.mark.long),
    ],
)
def test_complex_weights_batch_statistics_and_ragged_text_are_one_curve(
    example: str, layouts: list[str], pool: Pool, tmp_path: Path
) -> None:
    """Each against one device; batchnorm with its statistics synchronised."""
    document = read_document(EXAMPLES / f"{example}.yaml")
    document.set("train.precision", "f64", "test")
    document.set("task", f"{EXAMPLES.parent}/{document.value['task']}", "test")
    config = load_document(document, Tasks()).config
    accumulated = ["fsdp:3/2"] if example != "batchnorm" else []
    check_one_curve(config, layouts + accumulated, pool, tmp_path, steps=5, near=1e-11)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        *(pytest.param(*layout, marks=pytest.mark.long) for layout in (("single", 1), ("dp", 2))),
        ("ddp", 2),
        ("fsdp", 2),
    ],
)
def test_unused_and_frozen_parameters_are_trained_around(
    strategy: str, world: int, pool: Pool, tmp_path: Path
) -> None:
    unused = small(model={"frozen": False})
    assert trained(pool, tmp_path / "one", small(), strategy, world) == pytest.approx(
        trained(pool, tmp_path / "two", unused, strategy, world), rel=1e-12
    )


def test_dropout_follows_the_sample(pool: Pool, tmp_path: Path) -> None:
    """Its masks are the same under every layout, and it is on."""
    config = small(model={"dropout": 0.3})
    one = trained(pool, tmp_path / "one", config, "single", 1)
    assert (
        max(
            abs(a - b)
            for a, b in zip(one, trained(pool, tmp_path / "off", small(), "single", 1), strict=True)
        )
        > 1e-3
    )
    for strategy, world in (("ddp", 3), ("dp", 2), ("fsdp", 2)):
        assert trained(pool, tmp_path / strategy, config, strategy, world) == pytest.approx(
            one, rel=1e-12
        )


@pytest.mark.long
def test_fsdp_rounds_as_autocast_does_and_recompute_changes_nothing(
    pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """bf16: the first two losses of fsdp are ddp's to the bit (the second follows one update);
    later ones differ by the order of sums only.
    """

    def run(name: str, strategy: str, recompute: str = "none") -> list[float]:
        values = tiny_values(
            corpus,
            train={"precision": "bf16", "steps": 12, "recompute": recompute},
            devices={"strategy": strategy},
        )
        return pool.run(2, train_tiny, TinyRun(tmp_path / name, values, cache))[0].losses  # type: ignore[no-any-return]

    ddp, fsdp = run("ddp", "ddp"), run("fsdp", "fsdp")
    assert fsdp[:2] == ddp[:2]
    np.testing.assert_allclose(fsdp, ddp, rtol=2e-3)
    for how in ("block", "selective"):
        assert run(f"ddp-{how}", "ddp", how) == ddp
        assert run(f"fsdp-{how}", "fsdp", how) == fsdp


def test_offloaded_state_changes_nothing(
    pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """The way through host memory, on ranks whose device is the host."""
    values = tiny_values(corpus, train={"steps": 8}, devices={"strategy": "fsdp"})
    plain, offloaded = (
        pool.run(2, train_tiny, TinyRun(tmp_path / f"run{fault}", values, cache, fault))[0]
        for fault in ("", "offload")
    )
    assert offloaded.losses == plain.losses


@pytest.mark.long
@pytest.mark.parametrize(
    "compress",
    [
        "bf16",
        pytest.param("powersgd", marks=pytest.mark.long),
        pytest.param("fp16", marks=pytest.mark.long),
    ],
)
def test_compressed_gradients_learn_much_the_same(
    compress: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    def run(name: str) -> Any:
        return pool.run(
            2,
            train_tiny,
            TinyRun(
                tmp_path / name,
                tiny_values(
                    corpus,
                    train={"precision": "f32"},
                    devices={"strategy": "ddp", "compress": name},
                ),
                cache,
            ),
        )[0]

    plain, narrow = run("none"), run(compress)
    assert narrow.losses != plain.losses
    assert any("results change" in warning for warning in narrow.plan.warnings)
    assert (
        abs(narrow.losses[-1] - plain.losses[-1])
        < (0.5 if compress == "powersgd" else 1e-3)
        < plain.losses[0] - plain.losses[-1]
    )
