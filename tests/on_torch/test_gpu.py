"""What only a GPU can show: the same curve as on the CPU, half precision, gradients over Gloo from GPU memory."""

from pathlib import Path

import numpy as np
import pytest
from commands import lockstep

from lockstep.observe.journal import read
from tiny import tiny_values, train_tiny
from worlds import Pool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["f64", "f32"])
def test_a_gpu_and_a_cpu_give_one_curve(precision: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path) -> None:
    """Kernels differ, so the tolerance is that of rounding carried through 50 steps."""
    values = tiny_values(corpus, train={"precision": precision})
    on_cpu = pool.run(1, train_tiny, tmp_path / "cpu", values, cache)[0]
    on_gpu = pool.run(1, train_tiny, tmp_path / "gpu", values, cache, "", None, None, "cuda:0")[0]
    np.testing.assert_allclose(on_gpu.losses, on_cpu.losses, rtol=1e-10 if precision == "f64" else 1e-4)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_sharing_one_gpu_over_gloo_give_one_curve(world: int, pool: Pool, corpus: Path, cache: Path, tmp_path: Path) -> None:
    values = tiny_values(corpus)
    one = pool.run(1, train_tiny, tmp_path / "one", values, cache, "", None, None, "cuda:0")[0]
    several = pool.run(world, train_tiny, tmp_path / "several", values, cache, "", None, None, "cuda:0")[0]
    np.testing.assert_allclose(several.losses, one.losses, rtol=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_half_precision_learns(precision: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path) -> None:
    values = tiny_values(corpus, train={"precision": precision})
    found = pool.run(2, train_tiny, tmp_path / "run", values, cache, "", None, None, "cuda:0")[0]
    assert np.mean(found.losses[-5:]) < 0.9 * np.mean(found.losses[:5])


def test_a_checkpoint_moves_between_gpu_and_cpu(pool: Pool, corpus: Path, cache: Path, tmp_path: Path) -> None:
    values = tiny_values(corpus)
    whole = pool.run(1, train_tiny, tmp_path / "whole", values, cache)[0]
    pool.run(1, train_tiny, tmp_path / "moved", values, cache, "", None, 25, "cuda:0")
    moved = pool.run(2, train_tiny, tmp_path / "moved", values, cache, "", tmp_path / "moved/checkpoints/step-00000025")[0]
    np.testing.assert_allclose(moved.losses, whole.losses, rtol=1e-10)


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_replicas_on_one_gpu_give_one_curve(strategy: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path) -> None:
    one = pool.run(1, train_tiny, tmp_path / "one", tiny_values(corpus), cache, "", None, None, "cuda:0")[0]
    values = tiny_values(corpus, devices={"use": "cpu:2", "strategy": strategy})
    found = pool.run(1 if strategy == "dp" else 2, train_tiny, tmp_path / "two", values, cache, "", None, None, "cuda:0")[0]
    np.testing.assert_allclose(found.losses, one.losses, rtol=1e-12)


@pytest.mark.parametrize("precision", ["f64", "bf16"])
def test_fsdp_on_a_gpu_gives_one_curve(precision: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path) -> None:
    """One rank over nccl: its gathers and scatters run, with nothing to share out; with and without recompute."""
    one = pool.run(1, train_tiny, tmp_path / "one", tiny_values(corpus, train={"precision": precision}), cache, "", None, None, "cuda:0")[0]
    for how in ("none", "block", "selective"):
        values = tiny_values(corpus, train={"precision": precision, "recompute": how}, devices={"strategy": "fsdp"})
        found = pool.run(1, train_tiny, tmp_path / how, values, cache, "", None, None, "cuda:0", backend="nccl")[0]
        np.testing.assert_allclose(found.losses, one.losses, rtol=1e-11 if precision == "f64" else 5e-3)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_exact_has_one_hash_on_a_gpu(precision: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path) -> None:
    """One rank, two and three over Gloo, and two replicas, all on this GPU; and twice the same."""
    found = []
    for number, (strategy, world) in enumerate((("single", 1), ("single", 1), ("ddp", 2), ("ddp", 3), ("dp", 2))):
        values = tiny_values(corpus, train={"precision": precision, "exact": True, "hash_every": 10}, devices={"use": f"cpu:{world}", "strategy": strategy})
        outcome = pool.run(1 if strategy == "dp" else world, train_tiny, tmp_path / f"{number}", values, cache, "", None, None, "cuda:0")[0]
        found.append((outcome.hashes, outcome.losses))
    assert all(one == found[0] for one in found)


def test_the_estimate_is_near_what_the_gpu_holds(corpus: Path, tmp_path: Path) -> None:
    """26M parameters at sequence 256: the plan's sum against the allocator's peak."""
    (tmp_path / "large.yaml").write_text(f"""\
model: {{hidden_size: 512, num_layers: 8, num_heads: 8, intermediate_size: 1408, max_seq_len: 256}}
data: {{source: {corpus}, eval_samples: 1}}
batch: {{samples: 8}}
train: {{steps: 4}}
devices: {{use: "0"}}
""")
    lockstep("train", "-f", "large.yaml", "--save-dir", "run", cwd=tmp_path)
    last = read(tmp_path / "run/journal.jsonl")[-1].values
    assert 0.6 < max(last["memory_bytes_by_device"]) / last["memory_estimate_bytes"] < 1.05
