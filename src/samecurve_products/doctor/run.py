"""Put all checks together, in the order in which they are shown."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samecurve.launch.gpu_settings import gpu_settings, without_user_settings
from samecurve.probe import cpu_cores, cpu_name, host_memory
from samecurve.seam import Device, Devices, Machine, checkout, choose_devices
from samecurve_products.doctor import Check, warned
from samecurve_products.doctor.collectives import CollectiveResult, CollectiveTests
from samecurve_products.doctor.devices import check_devices, read_gpus
from samecurve_products.doctor.software import check_jax, check_python, check_torch
from samecurve_products.doctor.system import Host, check_system
from samecurve_products.doctor.topology import check_topology, read_paths
from samecurve_products.doctor.trial import Trial, Trials

_DESCRIBE_TORCH = "samecurve_products.doctor.check_job:describe_torch"
_DESCRIBE_JAX = "samecurve_products.doctor.check_job:describe_jax"
_MODULES = ("torch", "torch.distributed", "samecurve_products.doctor.check_job")
_LIBRARY_LIMIT = 180.0  # seconds to import a library, which may come over a network
_CONFIG = Path("models/tiny.yaml")  # the one that is quick anywhere


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """A request to check this machine."""

    devices: str  # as the config's devices.use
    save_dir: Path
    limit: float  # seconds for ranks that try together
    environment: Mapping[str, str]
    say: Callable[[str], None]  # is told what is being tried


class MachineCheck:
    """All checks of this machine. `next_line` is known once all are made."""

    def __init__(self, request: CheckRequest) -> None:
        """UserError: a device that was asked for is not there."""
        self._request = request
        self._reading = read_gpus(request.environment)
        self._asked = self._choose(request.devices)
        self._has_failed = False  # before the collectives
        self.next_line = ""
        self.logs: list[str] = []  # the end of what ranks printed whose collectives failed

    def checks(self) -> Iterator[Check]:
        """Make the checks, one after the other."""
        for check in self._all_checks():
            self._has_failed |= check.status == "FAIL"
            yield check

    def _all_checks(self) -> Iterator[Check]:
        request, reading = self._request, self._reading
        wanted = gpu_settings(reading.gpus.vendor)
        environment = {
            **request.environment,
            **without_user_settings(wanted, request.environment),
        }
        environment.setdefault("NCCL_DEBUG", "WARN")
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="samecurve-check-")))
            trials = stack.enter_context(Trials(home, environment, _MODULES))
            jax = None
            if find_spec("jax"):
                jax = trials.start(_DESCRIBE_JAX, None, {}, fork=False)
            yield check_python()
            yield from check_devices(reading, request.environment)
            paths = read_paths(request.environment, len(reading.gpus.devices))
            yield from check_topology(paths, reading.states)
            yield from check_system(
                Host(
                    save_dir=request.save_dir,
                    ranks=len(self._asked),
                    gpus=sum(device.kind == "cuda" for device in self._asked),
                    environment=request.environment,
                )
            )
            yield from self._libraries_and_ranks(trials, jax)

    def _libraries_and_ranks(self, trials: Trials, jax: Trial | None) -> Iterator[Check]:
        gpus = self._reading.gpus
        torch = _facts(trials, trials.start(_DESCRIBE_TORCH, None, {}))
        yield from check_torch(torch, gpus)
        yield from check_jax(_facts(trials, jax) if jax else None, gpus)
        if "version" not in torch:
            self.next_line = "samecurve check, once torch works: the remedy of its line says how"
            return
        usable = torch["available"] and len(torch["names"]) >= len(gpus.devices)
        devices = self._asked if usable or self._asked[0].kind == "cpu" else self._two_cpu_ranks()
        tests = CollectiveTests(
            trials,
            self._request.environment,
            limit=self._request.limit,
            say=self._request.say,
        )
        result = tests.check(devices)
        self.logs = tests.logs
        self.next_line = self._next(result, devices)
        yield from result.checks
        if devices[0].kind == "cuda" and len(devices) == 1:
            yield from tests.check(self._two_cpu_ranks()).checks
        if devices[0].kind == "cpu" or len(devices) == 1:
            yield _untested(len(gpus.devices), usable=bool(usable))

    def _choose(self, use: str) -> tuple[Device, ...]:
        """The devices that ranks are tried on: GPUs, or at least two CPU ranks."""
        machine = self._machine()
        if self._reading.error and not use.startswith("cpu"):
            return machine.ranks_on_cpu(2)
        section = Devices(use=use)
        chosen = choose_devices(section, "torch", machine).value
        return chosen if chosen[0].kind == "cuda" or len(chosen) > 1 else machine.ranks_on_cpu(2)

    def _machine(self) -> Machine:
        """This machine. An engine that can't use its GPUs is told by a check, and not refused."""
        return Machine(
            devices=self._reading.gpus.devices,
            links=(),
            host_bytes=host_memory(),
            cores=cpu_cores(),
            cpu=cpu_name(),
        )

    def _two_cpu_ranks(self) -> tuple[Device, ...]:
        return self._machine().ranks_on_cpu(2)

    def _next(self, result: CollectiveResult, devices: tuple[Device, ...]) -> str:
        """The one line to try next."""
        if self._has_failed or not result.backend:
            return "samecurve check, once the FAIL lines are mended"
        words = [f"{name}={value}" for name, value in result.variables.items()]
        config = _config()
        if not config.is_file():  # an installed wheel has it, and writes it
            words = ["samecurve", "examples", "&&", *words]
        words += ["samecurve", "train", "-f", str(config)]
        if devices[0].kind == "cpu":
            words += ["--devices", f"cpu:{len(devices)}"]
        elif len(devices) == len(self._reading.gpus.devices):
            words += ["--devices", "auto"]
        else:
            words += ["--gpus", ",".join(str(device.index) for device in devices)]
        if result.backend == "gloo" and devices[0].kind == "cuda":
            words += ["--sync-backend", "cpu"]
        return " ".join(words)


def _config() -> Path:
    """A config that is at hand, or that `samecurve examples` writes here."""
    root = checkout()
    return _CONFIG if _CONFIG.is_file() or root is None else root / _CONFIG


def _facts(trials: Trials, trial: Trial) -> dict[str, Any]:
    """The facts of a library that a process tells; `error`, where it could not."""
    trials.wait([[trial]], _LIBRARY_LIMIT)
    if trial.done:
        return trial.reports[-1]
    why = f"no answer in {_LIBRARY_LIMIT:g} s" if trial.hung else trial.last_error()
    return {"error": why}


def _untested(gpus: int, *, usable: bool) -> Check:
    """Say what was not tried. gpus: on this machine. usable: by torch."""
    remedy = "samecurve check, on the machine that you will train on, before you train there"
    if not gpus:
        figure = "not tested: no GPU. Only Gloo between CPU ranks was tried"
    elif not usable:
        figure = "not tested: torch can't use the GPUs, as said above"
        remedy = "do first what the lines of torch above say; then: samecurve check"
    elif gpus == 1:
        figure = "not tested: one GPU has nobody to exchange anything with"
    else:
        figure = "not tested: it needs two GPUs, and fewer were asked for"
        remedy = "samecurve check tries all GPUs"
    return warned("NCCL collectives", figure, remedy)
