"""Writes what each step of a rehearsed process cost, and where it waited for its GPU.

This file runs in the process that is rehearsed, before anything of samecurve or torch is imported
there. It imports nothing of either, and changes no result. A step ends where the
TrainingStep of samecurve ends, or, in any other program, with a call of torch's `optimizer.step()`.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from samecurve_products.rehearse.emulated_cuda import report

_OF_SAMECURVE = "samecurve.torch_engine.step.training_step"
_OF_TORCH = "torch.optim.optimizer"
_NATIVE = "emulated_cuda_native"
_NCCL = f"{__package__}.nccl_group"


class StepWatch:
    """The counts of one process, step by step, appended to its file of the report."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._pid = 0  # a forked process has steps of its own
        self._is_samecurves = False  # its optimizers may be torch's: their steps don't count
        self._step = 0
        self._before: Mapping[str, Any] = {}

    def watch_samecurve(self, module: ModuleType) -> None:
        """Count the steps of samecurve's engine."""
        self._is_samecurves = True
        run = module.TrainingStep.run

        def run_and_count(*arguments: Any, **options: Any) -> Any:
            result = run(*arguments, **options)
            self.end_step()
            return result

        module.TrainingStep.run = run_and_count

    def watch_torch(self, module: ModuleType) -> None:
        """Count the steps of torch's optimizers."""

        def count(*_: object) -> None:
            if not self._is_samecurves:
                self.end_step()

        module.register_optimizer_step_post_hook(count)

    def end_step(self) -> None:
        """Write what was counted since the step before; the first step begins with the process."""
        native = sys.modules.get(_NATIVE)
        if native is None:
            return
        if self._pid != os.getpid():
            self._pid, self._step, self._before = os.getpid(), 0, {}
            native.count(True, True)
        self._step += 1
        now = _counts(native)
        before, self._before = self._before, now
        row = {"row": "step", "step": self._step, "memory_peak": now["memory_peak"]}
        for name in ("launches", "copies_to_device", "copies_to_host", *_collectives({})):
            row[name] = now[name] - before.get(name, 0)
        row["syncs"] = dict(now["syncs"] - before.get("syncs", Counter()))
        report.append(self._directory, row)


def _counts(native: ModuleType) -> dict[str, Any]:
    """All that was counted since this process began."""
    counts = native.counts()
    return {
        "launches": sum(counts["launches"].values()),
        "copies_to_device": counts["h2d"],
        "copies_to_host": counts["d2h"],
        "syncs": Counter(counts["sync_at"]),
        "memory_peak": max(
            (native.memory(index)[1] for index in range(native.device_count())), default=0
        ),
        **_collectives(vars(sys.modules.get(_NCCL, os))),
    }


def _collectives(nccl: Mapping[str, Any]) -> dict[str, int]:
    """Calls of collectives, and the bytes that this process gave to them."""
    return {
        "collectives": sum(nccl.get("counted", {}).values()),
        "collective_bytes": sum(nccl.get("counted_bytes", {}).values()),
    }


class ModuleFinder:
    """Finds some modules as Python does, and has a function look at each once it is imported."""

    def __init__(self, watched: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._watched = dict(watched)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        del path, target
        if fullname not in self._watched:
            return None
        look = self._watched.pop(fullname)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            look(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Watch the steps of this process, if a report is asked for."""
    directory = os.environ.get("EMULATED_CUDA_REPORT")
    if directory:
        watch = StepWatch(directory)
        watched = {_OF_SAMECURVE: watch.watch_samecurve, _OF_TORCH: watch.watch_torch}
        sys.meta_path.insert(0, ModuleFinder(watched))
