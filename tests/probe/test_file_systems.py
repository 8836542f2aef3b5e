"""Whether a directory lies behind a network, by a list of mounts as Linux writes it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from commands import write_config
from samecurve import probe
from samecurve.cli.plan import plan
from samecurve.observe import read_events
from samecurve.probe import file_system, is_network, network_note
from starts import start
from tiny import tiny_values

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
31 22 0:40 / /home rw shared:2 master:7 - nfs4 server:/home rw,vers=4.2
32 31 8:2 / /home/me/fast\\040disk rw - xfs /dev/sdb rw
33 22 0:41 / /scratch rw - lustre mds@tcp:/scratch rw
34 22 0:42 / /buckets rw - fuse.gcsfuse bucket rw
35 22 0:43 / /layers rw - fuse.fuse-overlayfs layers rw
36 33 8:3 / /scratch/local rw - tmpfs tmpfs rw
37 36 0:44 / /scratch/local rw - cifs //server/share rw
short line
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    file = tmp_path / "mountinfo"
    file.write_text(MOUNTS)
    return file


@pytest.mark.parametrize(
    ("place", "kind", "network"),
    [
        ("/work/run", "ext4", False),
        ("/homestead/run", "ext4", False),
        ("/home/me/run", "nfs4", True),
        ("/home/me/fast disk/run", "xfs", False),
        ("/scratch/run", "lustre", True),
        ("/buckets/run", "fuse.gcsfuse", True),
        ("/layers/run", "fuse.fuse-overlayfs", False),
        ("/scratch/local/run", "cifs", True),  # mounted over the other one
    ],
)
def test_the_innermost_newest_mount_says_what_a_place_is_on(
    mounts: Path, place: str, kind: str, *, network: bool
) -> None:
    assert file_system(Path(place), mounts) == kind
    assert is_network(kind) is network
    note = network_note(Path(place), mounts)
    assert (note is not None) is network
    if note:
        assert f"{place} is on a network file system ({kind})" in note[0]
        assert "--save-dir" in note[1]


def test_a_system_without_a_list_says_nothing(tmp_path: Path) -> None:
    assert file_system(tmp_path, tmp_path / "none") == ""
    assert network_note(tmp_path, tmp_path / "none") is None


def test_this_machine_has_a_list() -> None:
    assert file_system(Path("/proc"), probe.MOUNTS) == "proc"


def test_a_start_and_a_plan_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, corpus: Path
) -> None:
    """The journal of a run that begins on a network file system has the line; so has `plan`."""
    monkeypatch.setattr(probe, "file_system", lambda *_: "nfs4")
    start(tmp_path / "run", tiny_values(corpus), cache)
    warned = [
        event for event in read_events(tmp_path / "run/journal.jsonl") if event.kind == "warned"
    ]
    assert any("network file system (nfs4)" in event.values["text"] for event in warned)
    monkeypatch.chdir(tmp_path)
    file = write_config(tmp_path, corpus)
    shown = CliRunner().invoke(plan, ["-f", str(file)])
    assert "warn   runs is on a network file system (nfs4)" in shown.output
