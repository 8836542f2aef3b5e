"""How gradients are added up over microbatches and ranks, where no tree says in which order."""

from pathlib import Path

import torch
from torch import nn

from one_curve import check_one_curve
from samecurve.torch_engine.strategies.reducers.buckets import Bucket, cut_into_buckets
from tiny import config_of
from worlds import Pool

IN_PARTS = f"{Path(__file__).parent}/in_parts.py:InParts"


def test_a_gradient_that_comes_in_parts_is_summed_whole(pool: Pool, tmp_path: Path) -> None:
    """A bucket that is sent while a pass still runs would miss the second part."""
    config = config_of(
        {
            "task": IN_PARTS,
            "batch": {"samples": 12},
            "train": {"exact": False, "precision": "f64"},
        }
    )
    check_one_curve(config, ["ddp:2", "ddp:3/2"], pool, tmp_path, steps=4, near=1e-12)


def test_a_bucket_has_one_number_format() -> None:
    kinds = [torch.float32, torch.float32, torch.float64, torch.complex64, torch.float32]
    weights = [nn.Parameter(torch.zeros(3, dtype=kind)) for kind in kinds]
    cuts = cut_into_buckets(weights)
    assert cuts == [slice(3, 5), slice(2, 3), slice(0, 2)]  # complex64 are pairs of float32
    bucket = Bucket(weights[cuts[0]], num_shards=4)
    flat = bucket.filled([torch.ones(3, dtype=torch.complex64), None])
    assert (flat.dtype, bucket.size % 4, flat.sum().item()) == (torch.float32, 0, 3)
