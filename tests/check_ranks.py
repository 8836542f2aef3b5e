"""Ranks for the tests of `samecurve check`, in the place of its own: some that don't do their work,
and some that only tell what ranks on GPUs would.
"""

import json
import os
import time
from typing import Any

from samecurve_products.doctor.check_job import reporter, try_collectives

STAGES = ("joining", "all-reduce", "broadcast", "all-gather", "DDP step")


def second_never_joins(value: str) -> None:
    """The ranks of `samecurve check`, but that rank 1 only sleeps."""
    if json.loads(value)["rank"] == 1:
        report = reporter()
        time.sleep(3600)
        report(stage="late")
    try_collectives(value)


def second_breaks(value: str) -> None:
    """The ranks of `samecurve check`, but that rank 1 raises an error once it is there."""
    if json.loads(value)["rank"] == 1:
        _ = reporter()
        raise RuntimeError("no kernel image is available")
    try_collectives(value)


def as_gpus(value: str) -> None:
    """A rank that tells what one on a GPU would. CHECK_FAULT says what goes wrong.

    p2p: NCCL hangs as long as GPUs may read each other's memory. card: it hangs on GPU 2 in any
    case. slow: it is slow as long as they may. wrong: gradients are wrong. gloo: Gloo hangs.
    """
    rank, fault = json.loads(value), os.environ.get("CHECK_FAULT", "")
    report = reporter()
    without_peers = os.environ.get("NCCL_P2P_DISABLE") == "1"
    is_nccl = rank["backend"] == "nccl"
    hangs = {
        "p2p": is_nccl and not without_peers,
        "card": is_nccl and rank["place"] == "cuda:2",
        "gloo": not is_nccl,
    }
    for stage in STAGES:
        report(stage=stage)
        if stage == "all-reduce" and hangs.get(fault):
            time.sleep(3600)
        is_slow = fault == "slow" and not without_peers
        is_wrong = fault == "wrong" and is_nccl
        report(stage=stage, **_told(stage, rank, is_slow=is_slow, is_wrong=is_wrong))
    report(stage="done")


def _told(stage: str, rank: dict[str, Any], *, is_slow: bool, is_wrong: bool) -> dict[str, float]:
    if stage == "joining":
        return {}
    if stage == "DDP step":
        return {"difference": 0.5 if is_wrong else 1e-16}
    rate = 1e9 if rank["backend"] == "gloo" else (1e8 if is_slow else 1e11)
    return {"seconds": rank["bytes"] / rate}
