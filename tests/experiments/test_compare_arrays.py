"""compare-runs names the arrays that differ, and by how much, whoever wrote the checkpoints."""

from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from samecurve.checkpoint import MANIFEST
from samecurve.checkpoint.format import make_manifest, write_pieces
from samecurve.core.planning.fixed import Fixed
from samecurve.core.protocols import ArrayShard
from samecurve.core.system import write_json
from samecurve.errors import UserError
from samecurve_products.report.compare import compare_arrays
from samecurve_products.report.compare.compare_arrays import compare_saved_arrays
from samecurve_products.report.compare.compare_runs import Comparison, describe_comparison

FIXED = Fixed(
    global_batch_size=4, micro_batch_size=4, seed=0, samples=9, fingerprint="", threads=1
).to_json()
META = {
    "step": 4,
    "epoch": 0,
    "consumed": 4,
    "config": {},
    "fixed": FIXED,
    "loop": {},
    "versions": {},
}
NAMES = {np.dtype("float32"): "F32", np.dtype("float64"): "F64", np.dtype("int64"): "I64"}


def save(path: Path, arrays: dict[str, Any], ranks: int = 1) -> Path:
    """A checkpoint whose arrays are cut by their first dimension into as many files."""
    path.mkdir(parents=True)
    written = []
    for rank in range(ranks):
        pieces = []
        for name, values in arrays.items():
            array = np.asarray(values)
            begin: tuple[int, ...] = ()
            if array.ndim == 0:
                if rank:
                    continue
                part = array
            else:
                bounds = [len(array) * at // ranks for at in (rank, rank + 1)]
                part = np.ascontiguousarray(array[bounds[0] : bounds[1]])
                begin = (bounds[0], *(0 for _ in array.shape[1:]))
            if part.size:
                pieces.append(ArrayShard(name, NAMES[array.dtype], array.shape, begin, part))
        written.append(asdict(write_pieces(path / f"rank-{rank}.safetensors", pieces)))
    write_json(path / MANIFEST, make_manifest(META, written))
    return path


@pytest.fixture
def arrays() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        **{
            f"model/layers.{number}.weight": random.normal(size=(6, 50)).astype(np.float32)
            for number in (2, 10)
        },
        "optimizer/exp_avg/layers.2.weight": random.normal(size=(7,)),
        "loop/late/layers.2.weight": np.int64(3),
    }


def test_shards_of_any_ranks_are_compared_as_whole_arrays(
    arrays: dict[str, Any], tmp_path: Path
) -> None:
    one, three = save(tmp_path / "one", arrays), save(tmp_path / "three", arrays, ranks=3)
    assert compare_saved_arrays(one, three) == ([], 4)
    with patch.object(compare_arrays, "_PIECE", 100):  # a row at a time
        assert compare_saved_arrays(three, one) == ([], 4)


def test_what_differs_is_named_in_the_order_of_layers_with_its_distance(
    arrays: dict[str, Any], tmp_path: Path
) -> None:
    changed = {name: np.array(values) for name, values in arrays.items()}
    changed["optimizer/exp_avg/layers.2.weight"] *= 1.5
    changed["model/layers.10.weight"][3, 4] += 0.5
    weight = changed["model/layers.2.weight"]
    weight[0, 0] = np.nextafter(weight[0, 0], np.float32(9))
    first, second = save(tmp_path / "a", arrays, 2), save(tmp_path / "b", changed, 3)
    different, count = compare_saved_arrays(first, second)
    assert [one.name for one in different] == [
        "model/layers.2.weight",
        "model/layers.10.weight",
        "optimizer/exp_avg/layers.2.weight",
    ]
    assert count == 4
    digit, half, third = (one.distance for one in different)
    assert 0 < (digit or 0) < 1e-7
    norms = [np.linalg.norm(each["model/layers.10.weight"]) for each in (arrays, changed)]
    assert half == pytest.approx(0.5 / max(norms))
    assert third == pytest.approx(1 / 3)
    names = [one.name for one in different]
    comparison = Comparison({}, 4, arrays=names, distances=different, arrays_at=4, num_arrays=4)
    line = describe_comparison(comparison, tmp_path, tmp_path)[0]
    assert line.startswith("differ step 4: model/layers.2.weight (by ")
    assert "optimizer/exp_avg/layers.2.weight (by 3.3e-01), of 4 arrays" in line


def test_what_only_one_run_has_or_in_another_form_is_said_in_words(
    arrays: dict[str, Any], tmp_path: Path
) -> None:
    others = {name: values for name, values in arrays.items() if not name.startswith("loop/")}
    others["model/layers.2.weight"] = arrays["model/layers.2.weight"][:, :49].copy()
    others["model/layers.10.weight"] = arrays["model/layers.10.weight"].astype(np.float64)
    first, second = save(tmp_path / "a", arrays), save(tmp_path / "b", others)
    texts = [str(one) for one in compare_saved_arrays(first, second)[0]]
    assert texts == [
        "model/layers.2.weight (F32 [6, 50] against F32 [6, 49])",
        "model/layers.10.weight (F32 [6, 50] against F64 [6, 50])",
        "loop/late/layers.2.weight (in the first run only)",
    ]


def test_numbers_that_are_not_finite_and_signs_of_zeros(tmp_path: Path) -> None:
    """A mask of infinities is equal to itself; the sign of a zero is a bit."""
    mask = np.array([0.0, -np.inf, np.nan])
    one = save(tmp_path / "a", {"model/mask": mask, "model/zero": np.array([0.0, 1.0])})
    other = save(tmp_path / "b", {"model/mask": mask, "model/zero": np.array([-0.0, 1.0])})
    (zero,), _ = compare_saved_arrays(one, other)
    assert (zero.name, zero.distance) == ("model/zero", 0.0)


def test_a_damaged_checkpoint_is_named(arrays: dict[str, Any], tmp_path: Path) -> None:
    good, bad = save(tmp_path / "good", arrays), save(tmp_path / "bad", arrays)
    data = (bad / "rank-0.safetensors").read_bytes()
    (bad / "rank-0.safetensors").write_bytes(data[:-4])
    with pytest.raises(UserError, match=r"bad can't be read: .* cut off"):
        compare_saved_arrays(good, bad)
