"""What processes find in their environment before CUDA or XLA reads it."""

import os
from typing import Any

import pytest

from samecurve.errors import UserError
from samecurve.launch.gpu_settings import (
    allocator_variable,
    gpu_settings,
    without_user_settings,
)
from samecurve.worker.cublas import set_repeating_workspace
from worlds import Pool


def test_the_allocator_is_set_by_the_name_that_this_torch_reads() -> None:
    names = [allocator_variable(version) for version in ("2.8.0+cu126", "2.9.1", "2.11.0+cu130")]
    assert names == ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]


def test_what_the_user_set_stays_by_any_of_its_names() -> None:
    wanted = gpu_settings("NVIDIA")
    assert "expandable_segments:True" in wanted.values()
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        added = without_user_settings(wanted, {name: "backend:native", "CUDA_DEVICE_ORDER": "x"})
        assert set(added) == {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    assert "expandable_segments:True" not in gpu_settings("AMD").values()
    assert gpu_settings("") == {}


def workspace(_index: int, _group: Any) -> str | None:
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def test_a_warm_rank_has_the_workspace_before_cuda_starts(pool: Pool) -> None:
    """Its first job on a GPU need not be the one of train.exact."""
    assert pool.run(1, workspace) == [":4096:8"]


def test_exact_is_refused_where_products_would_not_repeat() -> None:
    environment: dict[str, str] = {}
    set_repeating_workspace(environment, cuda_started=False)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    set_repeating_workspace(environment, cuda_started=True)  # set before it started
    set_repeating_workspace({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, cuda_started=False)
    with pytest.raises(UserError, match="started CUDA in this process") as refusal:
        set_repeating_workspace({}, cuda_started=True)
    assert "%env CUBLAS_WORKSPACE_CONFIG=:4096:8" in refusal.value.remedy
    with pytest.raises(UserError, match="CUBLAS_WORKSPACE_CONFIG=:0:0: with it"):
        set_repeating_workspace({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, cuda_started=False)
