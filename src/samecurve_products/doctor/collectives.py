"""A real test of collectives: ranks on the devices, each in a process that may hang.

All ranks do an all-reduce, a broadcast and an all-gather over each backend, compare the results and
take the time; then a step of DDP, whose gradients are compared with those of one process. What does
not end within its limit is killed, and the ranks are tried pair by pair.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

from samecurve.seam import Device, counted, join_words, some
from samecurve.units import show_rate
from samecurve_products.doctor import Check, failed, passed, warned
from samecurve_products.doctor.check_job import CollectiveTest
from samecurve_products.doctor.trial import Trial, Trials
from samecurve_products.lab.collectives_job import bus_factor

JOB = "samecurve_products.doctor.check_job:try_collectives"
WITHOUT_PEERS = "NCCL_P2P_DISABLE"
_BYTES = {"nccl": 64 << 20, "gloo": 4 << 20}  # of the whole array: enough to fill a link
_TOLERANCE = 1e-10  # of gradients in f64, whose last digits follow the order of a sum
_MOST_PAIRS = 6  # that are named
_WORDS = {"nccl": "NCCL", "gloo": "Gloo"}
# where a rank that hangs has come to
_STAGES = {"": "did not start", "started": "did not begin to join", "joining": "hung in joining"}
_FASTER = 1.2  # a rate that is higher by less than this may be chance


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Ranks on some devices, over one backend, and what became of them."""

    devices: Sequence[Device]
    backend: str
    ranks: Sequence[Trial]

    @property
    def works(self) -> bool:
        return all(rank.done for rank in self.ranks) and self.difference <= _TOLERANCE

    @property
    def difference(self) -> float:
        """The largest difference of DDP's gradients from one process's; NaN is none to accept."""
        differences = [rank.value("DDP step", "difference") for rank in self.ranks]
        known = [float(each) for each in differences if each is not None]
        return math.inf if any(map(math.isnan, known)) else max(known, default=math.inf)

    def rate(self, name: str) -> float:
        """Bytes a second that a collective moves over each link: the bus bandwidth of nccl-tests.

        0.0: it did not come so far.
        """
        seconds = [rank.value(name, "seconds") for rank in self.ranks]
        if None in seconds or not max(seconds):
            return 0.0
        return float(_BYTES[self.backend] * bus_factor(name, len(self.ranks)) / max(seconds))

    def figure(self) -> str:
        """The ranks, and either their rates or how they failed."""
        ranks = _ranks_text(self.devices)
        if not self.works:
            held = [f"process {rank.process.pid}" for rank in self.ranks if rank.is_held]
            rest = f"; {join_words(held)} can't be killed: restart the machine" if held else ""
            return f"{ranks}: {self.failure()}{rest}"
        names = ("all-reduce", "broadcast", "all-gather")
        rates = ", ".join(f"{name} {show_rate(self.rate(name))}" for name in names)
        return (
            f"{ranks}: {rates}, all results right; the gradients of a DDP step differ from those of"
            f" one process by {self.difference:.1g}"
        )

    def failure(self) -> str:
        """How it failed: the first rank that ended with an error, or where the ranks hung."""
        for index, rank in enumerate(self.ranks):
            if rank.failed:
                name = _name(self.devices[index], index)
                return f"{name} failed in {rank.stage or 'its start'}: {rank.last_error()}"
        if all(rank.done for rank in self.ranks):
            return f"the gradients of a DDP step are wrong by {self.difference:.1g}"
        stages = [rank.stage for rank in self.ranks]
        order = list(dict.fromkeys(one["stage"] for rank in self.ranks for one in rank.reports))
        first = min(stages, key=lambda stage: order.index(stage) if stage in order else -1)
        how = _STAGES.get(first, f"hung in {first}")
        last = [index for index, stage in enumerate(stages) if stage == first]
        if len(last) == len(stages):
            return f"all ranks {how.replace('hung', 'hang')}"
        return f"{join_words([_name(self.devices[index], index) for index in last])} {how}"


@dataclass(frozen=True, kw_only=True)
class CollectiveResult:
    """The checks, and what a run on these devices needs.

    variables: to set before a run
    backend: that works between the devices; '': none does
    """

    checks: list[Check]
    variables: Mapping[str, str]
    backend: str


class CollectiveTests:
    """Tries collectives on devices."""

    def __init__(
        self,
        trials: Trials,
        environment: Mapping[str, str],
        *,
        limit: float,
        say: Callable[[str], None],
        job: str = JOB,
    ) -> None:
        """limit: seconds for ranks that try together. say: is told what is being tried.

        job: what a rank does
        """
        self._trials, self._environment, self._limit = trials, environment, limit
        self._say, self._job = say, job
        self.logs: list[str] = []  # of ranks that failed; of all, where the user asks NCCL for more

    def check(self, devices: Sequence[Device]) -> CollectiveResult:
        """Try all that these devices can do together. devices: GPUs, or two CPU ranks or more."""
        if devices[0].kind == "cpu":
            return self._check_cpu(devices)
        if len(devices) == 1:
            return self._check_one(devices)
        gloo = self._try(devices, "gloo")
        checks, variables, works = self._check_nccl(devices, gloo)
        slower = "gloo" if gloo.works else ""
        return CollectiveResult(
            checks=[*checks, self._gloo_check(gloo, is_needed=not works)],
            variables=variables,
            backend="nccl" if works else slower,
        )

    def _check_cpu(self, devices: Sequence[Device]) -> CollectiveResult:
        gloo = self._try(devices, "gloo")
        check = self._gloo_check(gloo, is_needed=True)
        return CollectiveResult(checks=[check], variables={}, backend="gloo" if gloo.works else "")

    def _check_one(self, devices: Sequence[Device]) -> CollectiveResult:
        """Try whether one GPU computes: it has nobody to exchange anything with."""
        alone = self._try(devices, "nccl")
        if alone.works:
            figure = f"GPU {devices[0].index} computes: a step's gradients are right"
            checks = [passed("GPU step", figure)]
        else:
            remedy = (
                "look at the lines above that are not PASS: they name what is wrong with the GPU or"
                " with torch. If all are PASS: samecurve check --report, in a bug report"
            )
            checks = [failed("GPU step", alone.figure(), remedy)]
        return CollectiveResult(checks=checks, variables={}, backend="none" if alone.works else "")

    def _gloo_check(self, attempt: Attempt, *, is_needed: bool) -> Check:
        """is_needed: no other backend works between these devices."""
        name = "Gloo collectives"
        if attempt.works:
            return passed(name, attempt.figure())
        figure = f"{attempt.figure()}{self._pairs_text(attempt, {})}"
        remedy = (
            "GLOO_SOCKET_IFNAME=lo samecurve check keeps Gloo off the network: if that passes, set"
            f" it for training too; --limit {10 * self._limit:g} waits longer on a busy machine;"
            " `top` shows what keeps the cores busy"
        )
        return failed(name, figure, remedy) if is_needed else warned(name, figure, remedy)

    def _check_nccl(
        self, devices: Sequence[Device], gloo: Attempt
    ) -> tuple[list[Check], Mapping[str, str], bool]:
        """The checks, the variables that it needs, and whether it works with them."""
        name, whole = "NCCL collectives", self._try(devices, "nccl")
        is_slow = whole.works and whole.rate("all-reduce") < gloo.rate("all-reduce")
        if whole.works and not is_slow:
            return [passed(name, whole.figure())], {}, True
        variables: Mapping[str, str] = {WITHOUT_PEERS: "1"}
        again = None
        if WITHOUT_PEERS not in self._environment:
            again = self._try(devices, "nccl", variables)
        if is_slow:
            check, variables = _slow_check(whole, gloo, again)
            return [check], variables, True
        figure = f"{whole.figure()}{self._pairs_text(whole, {})}"
        if again and again.works:
            rate = show_rate(again.rate("all-reduce"))
            return (
                [
                    failed(
                        name,
                        f"{figure}. With {WITHOUT_PEERS}=1 all works, all-reduce {rate}",
                        f"export {WITHOUT_PEERS}=1 in the shell that starts training: data then"
                        " goes through the host's memory. The GPUs don't reach each other's memory"
                        " (P2P): lines on IOMMU and ACS above say why, if there are some",
                    )
                ],
                variables,
                True,
            )
        more = f"; {WITHOUT_PEERS}=1 does not help" if again else ""
        other = "--sync-backend cpu works, slowly; " if gloo.works else ""
        remedy = f"{other}NCCL_DEBUG=INFO samecurve check --report shows what NCCL itself says"
        return [failed(name, figure + more, remedy)], {}, False

    def _pairs_text(self, whole: Attempt, variables: Mapping[str, str]) -> str:
        """The pairs of ranks that fail, as the rest of a sentence."""
        devices = whole.devices
        if len(devices) == 2:
            return f" ({_name(devices[0], 0)} and {_name(devices[1], 1)})"
        bad: list[str] = []
        good = 0
        for pairs in rounds(len(devices)):
            attempts = self._try_each(
                [[devices[one], devices[other]] for one, other in pairs], whole.backend, variables
            )
            good += sum(attempt.works for attempt in attempts)
            bad += [
                f"{_name(devices[one], one)} and {_name(devices[other], other)}"
                for (one, other), attempt in zip(pairs, attempts, strict=True)
                if not attempt.works
            ]
        if not bad:
            return "; every pair of them works"
        works = f"; the other {counted(good, 'pair')} work" if good else ""
        return f"; pair by pair, these fail: {some(sorted(bad), _MOST_PAIRS)}{works}"

    def _try(
        self, devices: Sequence[Device], backend: str, variables: Mapping[str, str] | None = None
    ) -> Attempt:
        return self._try_each([devices], backend, variables or {})[0]

    def _try_each(
        self,
        groups: Sequence[Sequence[Device]],
        backend: str,
        variables: Mapping[str, str],
    ) -> list[Attempt]:
        """Try several groups of devices at once, each by itself."""
        how = "".join(f" with {name}={value}" for name, value in variables.items())
        who = " / ".join(_ranks_text(devices) for devices in groups)
        self._say(f"trying {who} over {_WORDS[backend]}{how}, for at most {self._limit:g} s")
        attempts = [
            Attempt(
                devices=devices,
                backend=backend,
                ranks=self._start(devices, backend, variables),
            )
            for devices in groups
        ]
        self._trials.wait([attempt.ranks for attempt in attempts], self._limit)
        for attempt in attempts:
            if not attempt.works or "NCCL_DEBUG" in self._environment:
                self.logs += [line for rank in attempt.ranks for line in rank.last_lines()]
        return attempts

    def _start(
        self, devices: Sequence[Device], backend: str, variables: Mapping[str, str]
    ) -> list[Trial]:
        store = self._trials.place("store")
        tests = [
            CollectiveTest(
                rank=rank,
                place=device.place,
                world=len(devices),
                backend=backend,
                store=str(store),
                bytes=_BYTES[backend],
            )
            for rank, device in enumerate(devices)
        ]
        return [self._trials.start(self._job, asdict(test), variables) for test in tests]


def _slow_check(
    whole: Attempt, gloo: Attempt, again: Attempt | None
) -> tuple[Check, Mapping[str, str]]:
    """NCCL is slower than the way through the host's memory."""
    figure = f"{whole.figure()}: slower than Gloo's {show_rate(gloo.rate('all-reduce'))}"
    faster = again and again.works and again.rate("all-reduce") > _FASTER * whole.rate("all-reduce")
    if again and faster:
        rate = show_rate(again.rate("all-reduce"))
        remedy = f"export {WITHOUT_PEERS}=1 in the shell that starts training: {rate} here"
        return warned("NCCL collectives", figure, remedy), {WITHOUT_PEERS: "1"}
    remedy = (
        "the lines on links, IOMMU and ACS above may say why; NCCL_DEBUG=INFO samecurve check"
        " --report has the paths that NCCL chose"
    )
    return warned("NCCL collectives", figure, remedy), {}


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of `count` ranks, in rounds in which each rank stands at most once."""
    waiting = list(combinations(range(count), 2))
    every: list[list[tuple[int, int]]] = []
    while waiting:
        busy: set[int] = set()
        pairs = []
        for pair in waiting:
            if not busy & set(pair):
                busy |= set(pair)
                pairs.append(pair)
        waiting = [pair for pair in waiting if pair not in pairs]
        every.append(pairs)
    return every


def _ranks_text(devices: Sequence[Device]) -> str:
    if devices[0].kind == "cpu":
        return counted(len(devices), "CPU rank")
    indices = [str(device.index) for device in devices]
    return f"GPU{'s' if len(indices) > 1 else ''} {join_words(indices)}"


def _name(device: Device, rank: int) -> str:
    return f"CPU rank {rank}" if device.kind == "cpu" else f"GPU {device.index}"
