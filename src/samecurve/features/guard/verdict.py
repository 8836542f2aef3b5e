"""What it means if the bits of a gradient are not the same each time that it is computed.

Nothing else sees a device that computes wrong: the sum gives its gradient to all devices alike.
Each engine computes and hashes; here hashes are judged, and a difference is told in words.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.errors import ASK_SAME_BITS, FaultyDeviceError, RunError
from samecurve.features.check_replicas.verdict import named_devices
from samecurve.features.guard import Choice, SentinelRule
from samecurve.units import some

Kind = Literal["transient", "lasting", "not deterministic"]
Row = NDArray[np.int64]  # the hash of each array of a gradient
_SHOWN = 8  # samples in a message


def alike(plan: Plan) -> list[list[int]]:
    """The devices by their models: devices of different models may round in different ways."""
    by_name: dict[str, list[int]] = {}
    for number, device in enumerate(plan.layout.devices):
        by_name.setdefault(device.name, []).append(number)
    return list(by_name.values())


def hosts_of_devices(plan: Plan, names: Sequence[str]) -> list[str]:
    """The host of each device; empty: there is one host. names: of the processes' hosts"""
    if len(set(names)) == 1:
        return []
    return [name for rank, name in enumerate(names) for _ in plan.layout.devices_of(rank)]


@dataclass(frozen=True)
class Finding:
    """A difference between computations of one gradient.

    suspects: devices whose results are wrong, or follow from nothing. others: the devices that
        agree with each other.
    arrays: places of the arrays that differ.
    """

    kind: Kind
    suspects: Sequence[int]
    others: Sequence[int]
    arrays: Sequence[int]


def judge(times: Sequence[Sequence[Row]], groups: Sequence[Sequence[int]]) -> Finding | None:
    """What is wrong with a gradient that every device has computed; None: nothing.

    times: for each device the hashes of each time that it computed the gradient
    groups: devices that must agree with each other
    """
    findings = (_judge_group({device: times[device] for device in group}) for group in groups)
    return next(filter(None, findings), None)


def _judge_group(times: dict[int, Sequence[Row]]) -> Finding | None:
    """Judge devices that must agree. Each has one vote, however often it has computed."""
    rows = {device: [row.tobytes() for row in each] for device, each in times.items()}
    if len({row for each in rows.values() for row in each}) < 2:
        return None
    table = np.stack([row for each in times.values() for row in each])
    arrays: list[int] = np.flatnonzero((table != table[0]).any(axis=0)).tolist()
    varying = [device for device, each in rows.items() if len(set(each)) > 1]
    steady = [device for device in rows if device not in varying]
    usual = _majority([rows[device][0] for device in steady])
    if len(rows) == 1:
        usual = _majority(rows[varying[0]])
    if len(varying) > 1 or (varying and usual is None):
        return Finding("not deterministic", varying, [], arrays)
    if varying:
        kind: Kind = "transient" if usual in rows[varying[0]] else "lasting"
        return Finding(kind, varying, steady, arrays)
    odd = [device for device in steady if rows[device][0] != usual]
    return Finding("lasting", odd, [device for device in steady if device not in odd], arrays)


def _majority(rows: Sequence[bytes]) -> bytes | None:
    """What most of them are; None: two are equally frequent."""
    counts = Counter(rows).most_common(2)
    is_tie = len(counts) > 1 and counts[0][1] == counts[1][1]
    return counts[0][0] if counts and not is_tie else None


@dataclass(frozen=True, kw_only=True)
class CheckedGradient:
    """A gradient that was computed again, and where.

    step: counted from 0. count: microbatches of the step. ids: of the microbatch's samples.
    names: of the gradient's arrays. hosts: of the devices; empty: one host
    """

    plan: Plan
    rule: SentinelRule
    step: int
    choice: Choice
    count: int
    ids: Sequence[int]
    names: Sequence[str]
    hosts: Sequence[str] = ()

    def passed(self, times: int) -> Event:
        """The journal's line of a check that found no difference."""
        return Event(
            "hashed",
            self.step + 1,
            {
                "gradients_alike": times,
                "microbatch": self.choice.number,
                "arrays_of_each": len(self.names),
            },
        )

    def report(self, finding: Finding, times: Sequence[int]) -> Event:
        """The journal's line of a difference that the run goes on with.

        times: how often each device has computed the gradient

        RunError: train.on_sentinel is stop.
        """
        cause, remedy = self.cause(finding, times), self._remedy(finding)
        if self.rule.on_difference == "stop":
            where = "train.sentinel"
            if finding.kind == "lasting":
                raise FaultyDeviceError(cause, remedy, where)
            raise RunError(cause, remedy, where, again=finding.kind == "transient")
        text = f"train.sentinel: {cause}. {remedy[:1].upper()}{remedy[1:]}"
        return Event("warned", self.step + 1, {"text": text, "sentinel": self._facts(finding)})

    def _facts(self, finding: Finding) -> dict[str, Any]:
        return {
            "found": finding.kind,
            "microbatch": self.choice.number,
            "sample_ids": list(self.ids),
            "devices": list(finding.suspects),
            "hosts": [self.hosts[device] for device in finding.suspects] if self.hosts else [],
            "arrays": [self.names[place] for place in finding.arrays],
        }

    def cause(self, finding: Finding, times: Sequence[int]) -> str:
        """What differs, where, in words."""
        ids = some([str(sample) for sample in self.ids], _SHOWN)
        first, more = self.names[finding.arrays[0]], len(finding.arrays) - 1
        what = f"the gradient of {first}" + (f" (and of {more} more arrays)" if more else "")
        return (
            f"in step {self.step + 1} microbatch {self.choice.number + 1} of {self.count} (samples"
            f" {ids}) was computed again, and {what} differs: {finding.kind}:"
            f" {self._who(finding, times)}"
        )

    def _who(self, finding: Finding, times: Sequence[int]) -> str:
        """Which devices gave other bits, and how often each has computed the gradient."""
        suspects, others = self._named(finding.suspects), self._named(finding.others)
        counts = sorted({times[device] for device in finding.suspects})
        often = " or ".join(map(str, counts)) + " times"
        if finding.kind == "not deterministic":
            return f"{suspects} computed it {often}, not always with the same bits"
        if finding.kind == "transient":
            agreeing = f", as {others}" if others else ""
            return f"{suspects} computed it {often}, once with other bits than else{agreeing}"
        if not others:
            return f"{suspects} differ, each with the same bits each time ({often})"
        return f"{suspects} computed it {often}, each time with other bits than {others}"

    def _named(self, devices: Sequence[int]) -> str:
        """Ranks or devices in words, with their GPUs and hosts."""
        texts = []
        for number in devices:
            device = self.plan.layout.devices[number]
            places = [device.place] if device.kind != "cpu" else []
            if self.hosts:
                places.append(f"on {self.hosts[number]}")
            texts.append(f"{number} ({' '.join(places)})" if places else str(number))
        return named_devices(self.plan, texts)

    def _remedy(self, finding: Finding) -> str:
        repeats, suspects = self.plan.compute.deterministic, self._named(finding.suspects)
        if finding.kind == "not deterministic":
            kernels = (
                "a kernel of your own, or a library's, adds in no fixed order (docs/guarantees.md)"
                if repeats
                else f"{ASK_SAME_BITS} takes kernels that give the same bits each time"
            )
            return (
                "no device is suspect: a kernel that gives other bits each time does so on every"
                f" device. {kernels}; or leave train.sentinel out, which can find nothing here"
            )
        devices = [self.plan.layout.devices[number] for number in finding.suspects]
        has_gpus = any(device.kind != "cpu" for device in devices)
        where = "`nvidia-smi -q -d ECC` and `dmesg`" if has_gpus else "`dmesg`"
        if finding.kind == "lasting":
            return (
                f"suspect {suspects}: leave it out (--gpus, another host), and"
                f" look at {where}. Steps before may be wrong, too: `samecurve audit RUN` tells"
                " since when. If it computes well elsewhere, look for code that asks which device"
                " it runs on"
            )
        return (
            "another start goes on from the last save. One such event may be chance; if"
            f" {suspects} is named again, look at {where}, and leave it out."
            " If the name changes from time to time, suspect a kernel that adds in no fixed order"
            + ("" if repeats else f": {ASK_SAME_BITS} takes others")
        )
