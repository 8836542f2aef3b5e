"""The fault campaign: nothing is lost by any fault, and it sees where something would be."""

from pathlib import Path

import chaos_ranks as ranks
import pytest
from chaos import FAMILIES, SEED, result_of, run_families
from chaos_jobs import Lab
from chaos_ranks import RankFault

from chaos_table import show


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nothing_is_lost(tmp_path: Path) -> None:
    """At least 200 faults, each followed by the unfailed run's curve and parameters."""
    outcomes = run_families(Lab(tmp_path, SEED), FAMILIES)
    print(show(result_of(outcomes, SEED, 0)))
    assert [outcome for outcome in outcomes if not outcome.recovered] == []
    assert len(outcomes) >= 200


_NO_CHECKSUM = """
from samecurve.checkpoint import store
from samecurve.checkpoint import read_manifest
store.verify = read_manifest
"""


@pytest.mark.long
def test_without_the_checksum_something_is_lost(tmp_path: Path) -> None:
    """A flipped bit is trained on."""
    fault = RankFault("", "save", 1, "flip_bit", 1.0, saves_lost=2)
    lab = Lab(tmp_path, SEED)
    [lost] = ranks.run_rank_faults(lab, [fault], program=_NO_CHECKSUM)
    assert not lost.recovered
    assert "differs from" in lost.note
    [seen] = ranks.run_rank_faults(lab, [fault])
    assert seen.recovered, seen.note


@pytest.mark.long
def test_without_the_rename_something_is_lost(tmp_path: Path) -> None:
    """What a kill leaves of a checkpoint is taken for one, and found damaged."""
    fault = RankFault("", "half a shard", 1)
    lab = Lab(tmp_path, SEED)
    [lost] = ranks.run_rank_faults(lab, [fault], environment={"CHAOS_WITHOUT": "rename"})
    assert not lost.recovered
    assert " is damaged: " in lost.note
    [seen] = ranks.run_rank_faults(lab, [fault])
    assert seen.recovered, seen.note
