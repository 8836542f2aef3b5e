"""Samples and evaluations under jax fsdp: with weights that stay cut, as on one device."""

from typing import Any

import jobs
import numpy as np
import pytest

from worlds import Pool

MODELS = {
    "gated": {"cssm": "gated", "steps": 2, "kernel_size": 3},
    "attention": {"cssm": "attention", "heads": 2},
}


def values(model: dict[str, Any], **devices: Any) -> dict[str, Any]:
    return {
        "task": "vision",
        "engine": "jax",
        "model": {"width": 16, "depth": 1, "patch": 2, **model},
        "data": {"source": "digits", "eval_samples": 50},
        "batch": {"samples": 10},
        "train": {"steps": 2, "precision": "f64"},
        "devices": devices,
    }


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_cut_weights_show_what_whole_weights_show(name: str, pool: Pool) -> None:
    """Pictures of the same answers, and the same metrics; a device holds little more than its part.

    A weight whose cut would need padding (a bias of 10 classes on 4 devices) is whole.
    """
    whole = pool.run(1, jobs.shown, values(MODELS[name], use="cpu:1"))[0]
    cut = pool.run(1, jobs.shown, values(MODELS[name], use="cpu:4", strategy="fsdp"))[0]
    assert len(whole[0]) > 5
    for one, other in zip(whole[0], cut[0], strict=True):
        np.testing.assert_array_equal(one, other)
    for metric, value in whole[1].items():
        np.testing.assert_allclose(cut[1][metric], value, rtol=1e-12, atol=0)
    assert whole[2] == 1
    assert cut[2] < 0.3
