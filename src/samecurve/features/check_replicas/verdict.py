"""Whether what several ranks or devices hold alike has the same bits on all.

Each of them hashes its arrays where they lie, and the engines exchange the hashes. Here the hashes
are compared, and a difference is told in words. A hash is a sum of integers, which depends on no
order of additions; one bit that differs always gives another hash.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from samecurve.core.planning.plan import Plan
from samecurve.errors import RunError
from samecurve.units import join_words, some

_SHOWN = 8  # ranks in a message


@dataclass(frozen=True)
class ReplicaHashes:
    """The hashes of all ranks, or of all devices where one process has several: the holders.

    names: of the arrays, in the order of the model.
    hashes: [holders, arrays], 64 bits each.
    parts: [holders, arrays], where in its array the part of a holder begins. Holders with the same
        number hold the same part.
    """

    names: Sequence[str]
    hashes: NDArray[np.int64]
    parts: NDArray[np.int64]

    def different_arrays(self) -> list[int]:
        """The places in `names` of the arrays of which two holders have the same part, and other
        bits.
        """
        order = np.lexsort((self.hashes, self.parts), axis=0)
        hashes = np.take_along_axis(self.hashes, order, axis=0)
        parts = np.take_along_axis(self.parts, order, axis=0)
        differ = (hashes[1:] != hashes[:-1]) & (parts[1:] == parts[:-1])
        places: list[int] = np.flatnonzero(differ.any(axis=0)).tolist()
        return places

    def holders(self, place: int) -> tuple[list[int], list[int]]:
        """The holders of the first part of an array that has several hashes: those that differ from
        the majority, and the majority; all of them, and [], where there is no majority.
        """
        hashes, parts = self.hashes[:, place], self.parts[:, place]
        for part in np.unique(parts):
            of_part = np.flatnonzero(parts == part)
            counts = Counter(hashes[of_part].tolist()).most_common()
            if len(counts) == 1:
                continue
            (usual, most), (_, second) = counts[:2]
            if most == second:
                return of_part.tolist(), []
            is_usual = hashes[of_part] == usual
            return of_part[~is_usual].tolist(), of_part[is_usual].tolist()
        return [], []


def check_alike(hashes: ReplicaHashes, plan: Plan, step: int) -> None:
    """RunError: holders differ. It names the first array that does, and who has other bits.

    step: how many steps are done
    """
    different = hashes.different_arrays()
    if not different:
        return
    odd, usual = hashes.holders(different[0])
    word, who = device_word(plan), named_devices(plan, odd)
    have = "has" if len(odd) == 1 else "have"
    who += f" {have} other bits than {named_devices(plan, usual)}" if usual else " differ"
    name, more = hashes.names[different[0]], len(different) - 1
    others = f" (and {more} more arrays)" if more else ""
    raise RunError(
        f"after step {step} {name}{others} is not the same on every {word}: {who}",
        _remedy(plan, word, odd),
        "train.check_replicas",
        again=True,  # a bit that memory has flipped is right again in the last save
    )


def device_word(plan: Plan) -> str:
    """What messages call the devices of a plan."""
    return "rank" if plan.layout.spec.processes == "one per device" else "device"


def named_devices(plan: Plan, texts: Sequence[object]) -> str:
    """Ranks or devices in words: `rank 2`, `ranks 0, 1 and 3`; '': none."""
    word, names = device_word(plan), list(map(str, texts))
    if len(names) <= 1:
        return f"{word} {names[0]}" if names else ""
    return f"{word}s {join_words(names) if len(names) <= _SHOWN else some(names, _SHOWN)}"


_WRITERS = {
    "rank": "after_step(), a hook, a branch on the rank",
    "device": "a hook, a method of the model that writes to its weights",
}


def _remedy(plan: Plan, word: str, suspects: Sequence[int]) -> str:
    """What a user can do, with the names of the GPUs that may be faulty."""
    places = dict.fromkeys(plan.layout.devices[number].place for number in suspects)
    gpus = [place for place in places if place != "cpu"]
    memory = f"memory of {some(gpus, _SHOWN)} (`nvidia-smi -q -d ECC`)" if gpus else "memory"
    return (
        "--resume RUN goes on from the last save, before which all were compared. Look for code"
        f" that changes weights on one {word} alone ({_WRITERS[word]}). If there is none, suspect"
        f" the {memory}, and look at `dmesg`"
    )
