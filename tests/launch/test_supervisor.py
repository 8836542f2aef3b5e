"""What the supervisor of ranks says of how they ended."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from samecurve.launch.supervisor import RankGroup
from samecurve.processes import start_program
from samecurve.processes.orphan_guard import OrphanGuard


def test_a_rank_that_ends_well_after_those_that_lost_it_had_left_before(tmp_path: Path) -> None:
    """It closes its connections first; nobody has told it to end."""
    go = tmp_path / "go"
    commands = ("exit 3", f"until [ -e {go} ]; do sleep 0.01; done")
    starts = [partial(start_program, ["sh", "-c", text], new_session=True) for text in commands]

    def let_go(_at_work: Mapping[int, int]) -> None:
        if group.has_failed:
            go.touch()

    with OrphanGuard() as orphans:
        group = RankGroup(starts, orphans=orphans, read_report=lambda _rank: None)
        group.start()
        group.watch([let_go])
    assert group.end.failed == {0: 3}
    assert group.end.finished_before == [1]
