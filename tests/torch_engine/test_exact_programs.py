"""train.exact with train.compile: all ranks compile the same programs, a rank that does not is
refused, and the compiled run has one hash on any devices.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commands import samecurve, write_config
from one_curve import check_one_curve
from samecurve.core.config.sections import Config
from samecurve.errors import UserError
from samecurve.features.compile.blocks import compile_model
from samecurve.torch_engine.process_group import Comm
from tiny import Outcome, TinyRun, config_of, tiny_values, train_tiny
from worlds import Pool

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's compiler looks at it itself
HERE = Path(__file__).parent


def compiled_programs(
    index: int, group: Any, kind: str, settings: dict[str, Any]
) -> dict[str, str]:
    """The digests of a rank's programs: forward, and backward if the layer is a norm.

    settings: of the last rank's compiler
    """
    from torch._inductor import config

    from samecurve.torch_engine.model.same_programs import SamePrograms

    programs = SamePrograms(Comm(group), 1, torch.device("cpu"))
    model = nn.LayerNorm(32) if kind == "norm" else nn.Linear(32, 32).requires_grad_(False)
    compile_model(model, programs)
    is_last = index == group.size() - 1
    with config.patch(settings if is_last else {}):
        result = model(torch.ones(4, 32))
        if kind == "norm":
            result.sum().backward()
    return programs.digests


def compiled_and_read(index: int, group: Any, kind: str) -> list[dict[str, str]]:
    """The digests of programs as they were compiled, and as they are read from the cache."""
    from torch._dynamo.utils import counters

    first = compiled_programs(index, group, kind, {})
    hits = counters["inductor"]["fxgraph_cache_hit"]
    second = compiled_programs(index, group, kind, {})
    assert counters["inductor"]["fxgraph_cache_hit"] > hits
    return [first, second]


def refusal(index: int, group: Any, kind: str, settings: dict[str, Any]) -> str:
    try:
        compiled_programs(index, group, kind, settings)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "other", "first"),
    [
        ("linear", {"size_asserts": False}, "linear"),  # no C++ is compiled for it
        pytest.param("norm", {"cpp.simdlen": 1}, "layer_norm", marks=pytest.mark.long),
    ],
)
def test_ranks_have_the_same_programs_and_a_rank_with_another_is_refused(
    kind: str, other: dict[str, Any], first: str, pool: Pool
) -> None:
    """Compiled by this rank, by the other one, or read from the cache. other: settings of the
    compiler that change the program, as those of another processor would.
    """
    ranks = pool.run(2, compiled_and_read, kind)
    assert all(digests == ranks[0][0] for both in ranks for digests in both)
    assert len(ranks[0][0]) == (2 if kind == "norm" else 1)
    said = "".join(pool.run(2, refusal, kind, other))
    assert re.match(
        "train.compile: train.exact: ranks [01] and [01] have compiled different programs of"
        rf" the model's {first} \(forward\)\n  remedy: the same torch",
        said,
    ), said


def tiny_run(
    pool: Pool, home: Path, corpus: Path, cache: Path, layout: str, **train: Any
) -> Outcome:
    """A run of 14 steps: ragged tokens, tails of epochs, evaluations. layout: strategy:devices"""
    strategy, _, world = layout.partition(":")
    values = tiny_values(
        corpus,
        batch={"samples": 10, "per_device": 2},
        devices={"use": f"cpu:{world}", "strategy": strategy},
        train={"steps": 14, "exact": True, "hash_every": 1, "eval_every": 7, **train},
    )
    processes = 1 if strategy == "dp" else int(world)
    outcome: Outcome = pool.run(processes, train_tiny, TinyRun(home, values, cache))[0]
    return outcome


@pytest.mark.long
@pytest.mark.parametrize(
    "train",
    [{"precision": "f32"}, {"precision": "bf16"}, {"precision": "f32", "recompute": "block"}],
)
def test_one_hash_compiled_on_any_devices(
    train: dict[str, Any], pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """Also the losses, norms and evaluations of each step. The bits are others than those of the
    model as it is written.
    """
    runs = {
        layout: tiny_run(
            pool, tmp_path / layout, corpus, cache, layout, **{"compile": True, **train}
        )
        for layout in ("single:1", "dp:3", "ddp:2", "ddp:3", "fsdp:2", "fsdp:3", "hsdp:4")
    }
    one = runs["single:1"]
    assert len(one.hashes) == 14
    for layout, run in runs.items():
        assert (run.hashes, run.losses, run.norms) == (one.hashes, one.losses, one.norms), layout
        losses = [[evaluated["loss"] for evaluated in r.evaluated] for r in (run, one)]
        assert losses[0] == losses[1], layout
    plain = tiny_run(pool, tmp_path / "plain", corpus, cache, "single:1", **train)
    assert plain.hashes != one.hashes


def models_config(kind: str, **train: Any) -> Config:
    return config_of(
        {
            "task": f"{HERE}/models.py:Task",
            "model": {"kind": kind},
            "batch": {"samples": 10, "per_device": 3},
            "optimizer": {"lr": 1e-2},
            "train": {"steps": 8, "exact": True, **train},
        }
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "train"),
    [
        ("plain", {"compile": True}),
        ("compiled", {}),
        ("compiled", {"compile": True}),
        ("method", {"compile": True}),
    ],
)
def test_moved_compiled_runs_keep_their_bits(
    kind: str, train: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    """ "compiled": parts that the model's author compiles."""
    layouts = ["ddp:3", "fsdp:2..single..ddp:3", "dp:2..fsdp:3"]
    check_one_curve(models_config(kind, **train), layouts, pool, tmp_path, steps=6, near=0.0)


@pytest.mark.long
def test_verify_bits_passes_compiled(corpus: Path, tmp_path: Path) -> None:
    done = samecurve(
        "verify",
        "-f",
        write_config(tmp_path, corpus),
        "--bits",
        "--compile",
        "--dtype",
        "f32",
        "--layouts",
        "single,dp:2,ddp:3,fsdp:2,fsdp:2..single..ddp:3",
        "--steps",
        "4",
        cwd=tmp_path,
        timeout=1200,
    )
    assert "PASS   all 5 layouts give the bits of one device" in done.stdout
