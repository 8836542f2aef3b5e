"""What only a GPU can show: the same curve as on the CPU, half precision, gradients over Gloo from GPU memory."""

from pathlib import Path

import numpy as np
import pytest

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
