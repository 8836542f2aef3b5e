"""What only a GPU can show of engine jax: the curve of the CPU on all GPUs, half precision, the
metrics of a run.
"""

from importlib.util import find_spec
from pathlib import Path

import jobs
import numpy as np
import pytest
from test_engine import EXAMPLES, small

from commands import samecurve, write_config
from samecurve.observe import read_events
from samecurve.probe import probe
from worlds import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
        reason="jax is installed without CUDA: pip install 'jax[cuda13]'",
    ),
]


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
@pytest.mark.parametrize("precision", ["f64", "f32"])
def test_gpus_and_a_cpu_give_one_curve(precision: str, strategy: str, pool: Pool) -> None:
    one = pool.run(1, jobs.trained, small(devices="cpu:1", train={"precision": precision}))[0][0]
    all_gpus = pool.run(
        1, jobs.trained, small(devices="all", strategy=strategy, train={"precision": precision})
    )[0][0]
    np.testing.assert_allclose(all_gpus, one, rtol=1e-10 if precision == "f64" else 1e-4)


def test_exact_has_one_hash_on_any_number_of_gpus(corpus: Path, tmp_path: Path) -> None:
    """One GPU twice, and all there are, each in a process of its own: kernels are chosen anew in
    each.
    """
    train = [
        "train",
        "-f",
        write_config(tmp_path, corpus, 20, 10),
        "--engine",
        "jax",
        "--exact",
        "--dtype",
        "f32",
    ]
    hashes = []
    for name, devices in (("one", "0"), ("again", "0"), ("all", "all")):
        samecurve(*train, "--devices", devices, "--save-dir", name, cwd=tmp_path)
        hashes.append(
            [
                event.values["hash"]
                for event in read_events(tmp_path / name / "journal.jsonl")
                if event.kind == "hashed"
            ]
        )
    assert hashes[0] == hashes[1] == hashes[2]


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_half_precision_learns(precision: str, pool: Pool) -> None:
    losses = pool.run(
        1, jobs.trained, small(devices="all", train={"precision": precision, "steps": 40})
    )[0][0]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])


def test_the_command_says_how_many_gpus_and_what_they_do(tmp_path: Path) -> None:
    """A step's journal line has memory; where the GPU's peak is on file and the task counts its
    work, MFU.
    """
    home = EXAMPLES.parent
    done = samecurve(
        "train",
        "-f",
        "models/tiny.yaml",
        "--engine",
        "jax",
        "--dtype",
        "bf16",
        "--max-steps",
        20,
        "--save-dir",
        tmp_path / "run",
        cwd=home,
    )
    assert f"Running on {len(probe().devices)} device" in done.stdout
    steps = [
        event.values
        for event in read_events(tmp_path / "run/journal.jsonl")
        if event.kind == "step"
    ]
    assert steps[-1]["memory_bytes"] > 0
    assert ("mfu" in steps[-1]) == (probe().devices[0].peak("bf16") is not None)
