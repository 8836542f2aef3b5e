"""Faults of the disk on which a run writes: full, or read-only, in the middle of a save."""

import re
from collections.abc import Sequence

from chaos_commands import trial
from chaos_jobs import SAVE, Lab, Outcome, require
from planted import Plant

_DISK = """\
mkdir run && mount -t tmpfs -o size=2m chaos run || exit 99
for start in $0; do
  "$@"
  echo "code $?"
  rm -f run/filler
  while umount run/checkpoints 2>/dev/null; do :; done
done
cp -a run kept
"""


def fail_disks(lab: Lab, how: str, says: str, kind: str, where: Sequence[str]) -> list[Outcome]:
    """The disk fails at these places, one after another; each time it is mended."""
    job = lab.job(kind, 60)
    plants = [
        Plant(place, number % 2 if place != "manifest" else 0, 12 + 6 * number, how)
        for number, place in enumerate(where)
    ]
    job.plant(plants)
    whats = [f"rank {plant.rank}, {plant.where}" for plant in plants]

    def run() -> None:
        starts = " ".join(map(str, range(len(plants) + 1)))
        words = ["unshare", "-m", "sh", "-c", _DISK, starts, *job.words()]
        ended = job.train(words=words)
        require(ended.code == 0, ended.text[-1500:])
        (job.home / "run").rmdir()
        (job.home / "kept").rename(job.home / "run")
        parts = re.split(r"^code (\d+)$", ended.text, flags=re.MULTILINE)
        codes = list(map(int, parts[1::2]))
        require(codes == [1] * len(plants) + [0], f"exit codes {codes}: {ended.text[-3000:]}")
        resumed = [line for line, event in enumerate(job.lines()) if event.kind == "resumed"]
        require(len(resumed) == len(plants), f"resumed {len(resumed)} times")
        for number, (what, text) in enumerate(zip(whats, parts[::2], strict=False)):
            require(bool(re.search(f"^error: .*{says}", text, re.MULTILINE)), text[-1500:])
            fired = job.fired(number)
            assert fired is not None
            step = job.lines()[resumed[number]].step
            require(fired.saving - step <= SAVE, f"{fired.step - step} steps lost")
            seconds = job.seconds_after(fired.time, resumed[number])
            job.add(what, max(fired.step - step, 0), seconds)
        job.check_equal(lab.unfailed(job.steps))

    return trial(job, whats, run)


def fill_disks(lab: Lab) -> list[Outcome]:
    places = ("save", "shard", "manifest", "data")
    says = "no room|No space|no space|disk is full|full"
    return fail_disks(lab, "fill_disk", says, "a full disk", places)


def make_read_only(lab: Lab) -> list[Outcome]:
    places = ("save", "half a shard", "manifest")
    return fail_disks(lab, "make_read_only", "read-only", "a directory read-only", places)
