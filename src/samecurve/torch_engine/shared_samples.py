"""Samples that the ranks of a run made in parts, put together in their order on every rank."""

import io
from collections.abc import Sequence

import numpy as np
import torch

from samecurve.core.protocols import Sample
from samecurve.torch_engine.process_group import Peers, texts_of_all


def samples_of_all(peers: Peers, own: Sequence[Sample], device: torch.device) -> list[Sample]:
    """All samples: number i is sample i // n of rank i % n, where n ranks made them.

    device: where the peers add up
    """
    parts = [_unpacked(text) for text in texts_of_all(peers, _packed(own), device)]
    most = max(map(len, parts))
    return [part[index] for index in range(most) for part in parts if index < len(part)]


def _packed(samples: Sequence[Sample]) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, *[np.asarray(sample) for sample in samples])
    return file.getvalue()


def _unpacked(packed: bytes) -> list[Sample]:
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        values = [arrays[f"arr_{number}"] for number in range(len(arrays.files))]
    return [value if value.ndim else str(value) for value in values]
