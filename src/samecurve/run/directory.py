"""A run is a directory: its files, and the processes that work on it."""

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from samecurve.core.config.document import dump, read_file
from samecurve.core.config.sections import Config, Registry, load
from samecurve.core.planning.plan import Plan
from samecurve.errors import RunError
from samecurve.system import write_json

# seconds by which two processes may differ on when a third began: the kernel's time of boot is
# rounded, and corrected
_CLOCK = 2.0
SCRATCH = ".initial"  # where weights to begin from are copied to, before a run is one


@dataclass(frozen=True)
class Run:
    """The paths of a run directory."""

    home: Path

    @property
    def config(self) -> Path:
        return self.home / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.home / "plan.json"

    @property
    def journal(self) -> Path:
        return self.home / "journal.jsonl"

    @property
    def control(self) -> Path:
        return self.home / "control.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.home / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def assets(self) -> Path:
        return self.home / "assets"

    @property
    def initial(self) -> Path:
        """A copy of the weights that the run began from (--init-from)."""
        return self.home / "initial"

    def exists(self) -> bool:
        return self.plan.is_file()

    def announce(self, rank: int) -> None:
        """Which process is this rank, for those who watch it."""
        with suppress(
            OSError
        ):  # a full disk; then it is watched by nobody, and training says what is wrong
            write_json(
                self.logs / f"process-{rank}.json",
                {
                    "pid": os.getpid(),
                    "host": socket.gethostname(),
                    "since": psutil.Process().create_time(),
                },
            )

    def processes(self) -> dict[int, int]:
        """The live processes of the ranks that were started on this host, by rank.

        A number that the system has given to another process since is left out: ranks may be killed
        by it.
        """
        found = {}
        for path in self.logs.glob("process-*.json"):
            with suppress(
                OSError, ValueError, KeyError, TypeError, psutil.Error
            ):  # somebody else's file, or it has ended
                said = json.loads(path.read_text())
                if (
                    said["host"] == socket.gethostname()
                    and abs(psutil.Process(int(said["pid"])).create_time() - said["since"]) < _CLOCK
                ):
                    found[int(path.stem.removeprefix("process-"))] = int(said["pid"])
        return found

    def write(
        self,
        config: Config,
        plan: Plan,
        origins: Mapping[str, str],
        formulas: Mapping[str, str],
        began: str | None = None,
        weights: str | None = None,
    ) -> None:
        """began: the checkpoint of another run that this one begins from.

        weights: what --init-from named.
        """
        scratch = self.config.with_name("config.yaml.part")
        scratch.write_text(dump(config.model_dump(mode="json")))
        scratch.replace(self.config)
        write_json(
            self.plan,
            {
                "plan": plan.to_json(),
                "origins": dict(origins),
                "formulas": dict(formulas),
                "began": began,
                "weights": weights,
            },
        )

    def began(self) -> str | None:
        """The checkpoint of another run that this one began from."""
        return self._said("began")

    def weights(self) -> str | None:
        """The path of the weights that this one began from."""
        return self._said("weights")

    def _said(self, key: str) -> str | None:
        try:
            found: str | None = json.loads(self.plan.read_text()).get(key)
            return found
        except (OSError, ValueError, AttributeError):
            return None

    def read_config(self, registry: Registry) -> Config:
        return load(read_file(self.config), registry).config

    def read_plan(self) -> Plan:
        try:
            return Plan.from_json(json.loads(self.plan.read_text())["plan"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self.plan} can't be read: {error}",
                "begin a new run with another --save-dir",
                str(self.plan),
            ) from None
