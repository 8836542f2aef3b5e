"""`samecurve train --nnodes` for engine torch: this host's part of a run on several hosts.

torch's elastic agent starts the ranks of this host, and finds the other hosts. Each rank is the
same command without these options, which takes its place from the environment as under torchrun.
When a host is lost, or comes, the agents start all ranks again: the run goes on from its last save,
with the same global batch, hence with the same curve.
"""

import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from samecurve.core.config.loading import LoadedConfig
from samecurve.core.planning.machine import choose_devices
from samecurve.errors import Interrupted, RunError, UserError
from samecurve.launch.network import (
    Interface,
    interface_towards,
    is_own,
    parse_place,
    resolve,
    use_interface,
)
from samecurve.launch.signals import Signals, kill_children, stopping
from samecurve.probe import probe
from samecurve.terminal import echo
from samecurve.worker.cluster_env import ENDED, GROUP, LEAVES

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

# seconds
_REACHED = 1800.0  # in which the first host must answer
_TRY = 3.0  # for one connection
_MORE_HOSTS = 5.0  # in which more hosts may come once there are enough
_BEAT, _MISSED = 2, 3  # between an agent's signs of life; that many missing: its host is lost
_LOST_HOSTS = 1000  # starts again, at most, where the number of hosts may change
_PACE = 0.1  # between an agent's looks at its ranks
_OPTIONS = ("--nnodes", "--rdzv", "--node-rank")


@dataclass(frozen=True)
class Hosts:
    """How many hosts, where they meet, and which one this is."""

    least: int
    most: int
    host: str
    port: int
    index: int | None = None  # None: the agents number the hosts

    @property
    def may_change(self) -> bool:
        return self.least < self.most


def read_hosts(nodes: str, rendezvous: str | None, index: int | None) -> Hosts:
    """The values of --nnodes, --rdzv and --node-rank. UserError: one is wrong, or missing."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", nodes)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UserError(
            f"--nnodes {nodes}",
            "a number of hosts, as 2, or the fewest and the most, as 1:4",
            "--nnodes",
        )
    if rendezvous is None:
        raise UserError(
            f"--nnodes {nodes} needs --rdzv HOST:PORT, where the hosts meet",
            "the same on every host: a name of the first one, and a free port there",
            "--nnodes",
        )
    if index is not None and (least != most or index >= most):
        why = "the number of hosts may change" if least != most else f"it is 0 to {most - 1}"
        raise UserError(
            f"--node-rank {index} of {nodes} hosts: {why}",
            "leave --node-rank out: the hosts are numbered as they come",
            "--node-rank",
        )
    return Hosts(least, most, *parse_place(rendezvous), index)


def run_on_hosts(loaded: LoadedConfig, hosts: Hosts, *, headless: bool) -> int:
    """Train with the ranks of this host, and of others that run the same command.

    Returns the exit code. UserError: this host has no such devices, or the way to the others is
    wrong. RunError: a rank has failed for good, or the first host does not answer.
    """
    devices = choose_devices(loaded.config.devices, loaded.config.engine, probe()).value
    ranks = len(devices) if loaded.config.engine == "torch" else 1
    way, is_first = _way_to(hosts)
    if not headless:
        number = f"{hosts.least} to {hosts.most}" if hosts.may_change else str(hosts.most)
        echo(
            f"hosts  {number}, {ranks} ranks on each; this one is {socket.gethostname()}, and meets"
            f" the others at {hosts.host}:{hosts.port} over {way.name or way.address}"
        )
    with tempfile.TemporaryDirectory(prefix="samecurve-") as scratch:
        ended = Path(scratch) / "ended"
        for name, value in _environment(hosts, ended).items():
            os.environ.setdefault(name, value)
        use_interface(way, os.environ)
        config = _config(loaded, hosts, ranks, way, is_first=is_first)
        code = _launch(config) if hosts.may_change else _launch_until_asked(config)
        with suppress(OSError, ValueError):  # no rank has said that it ended for good
            code = int(ended.read_text())
    if code > 128:
        others = "the others go on; " if hosts.may_change else ""
        echo(f"left   {others}the same command goes on from the last save", err=True)
    return code


def _launch_until_asked(config: "LaunchConfig") -> int:
    """Launch on a fixed number of hosts, where a signal to one of them stops the run on all.

    The ranks hear of it, not the agent: all of them leave in order, and the agents of all hosts end
    together. An agent that had gone ahead would be waited for.
    """

    def stop() -> None:
        ranks = psutil.Process().children()
        if not ranks:
            raise Interrupted
        for rank in ranks:
            with suppress(psutil.Error):
                rank.send_signal(signal.SIGTERM)
        with suppress(OSError):
            os.write(2, stopping())

    with Signals(stop, kill_children) as signals:
        code = _launch(replace(config, signals_to_handle="SIGQUIT"))
    return 128 + signals.received if signals.received and code == 0 else code


def _way_to(hosts: Hosts) -> tuple[Interface, bool]:
    """The interface to the first host, and whether this is the first host, where the others meet.

    Any other host waits here until the first one answers.
    """
    address = resolve(hosts.host)
    way = interface_towards(address)
    if is_own(address):
        return way, not _answers(
            address, hosts.port
        )  # else another agent of this machine serves it
    _wait_for_first(hosts, address)
    return way, False


def _answers(address: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((address, port), timeout=_TRY).close()
        return True
    return False


def _wait_for_first(hosts: Hosts, address: str) -> None:
    began, announced = time.monotonic(), False
    while True:
        try:
            socket.create_connection((address, hosts.port), timeout=_TRY).close()
            return
        except OSError as error:
            if time.monotonic() - began > _REACHED:
                raise RunError(
                    f"{hosts.host}:{hosts.port} ({address}) did not answer in"
                    f" {_REACHED / 60:g} minutes: {error.strerror or error}",
                    "the same command on the first host, and a firewall that lets the port through",
                    "--rdzv",
                    again=True,
                ) from None
        if not announced:
            echo(f"waiting for the first host at {hosts.host}:{hosts.port} ({address})", err=True)
            announced = True
        time.sleep(0.5)


def _environment(hosts: Hosts, ended: Path) -> dict[str, str]:
    """The variables of this host's ranks."""
    added = {
        GROUP: f"{hosts.host}:{hosts.port}",
        ENDED: str(ended),
        # each start has a store of its own, at a new port
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if hosts.may_change:
        added[LEAVES] = "1"
    return added


def _config(
    loaded: LoadedConfig, hosts: Hosts, ranks: int, way: Interface, *, is_first: bool
) -> "LaunchConfig":
    import logging

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    restarts = loaded.config.devices.max_restarts
    rendezvous: dict[str, Any] = {
        "is_host": is_first,
        "last_call_timeout": _MORE_HOSTS,
        "join_timeout": _REACHED,
        "keep_alive_interval": _BEAT,
        "keep_alive_max_attempt": _MISSED,
    }
    if hosts.index is not None:
        rendezvous = {"rank": hosts.index, "timeout": _REACHED}
    endpoint = f"[{hosts.host}]" if ":" in hosts.host else hosts.host
    return LaunchConfig(
        min_nodes=hosts.least,
        max_nodes=hosts.most,
        nproc_per_node=ranks,
        run_id=f"samecurve-{hosts.port}",
        rdzv_backend="c10d" if hosts.index is None else "static",
        rdzv_endpoint=f"{endpoint}:{hosts.port}",
        rdzv_configs=rendezvous,
        local_addr=way.address,
        max_restarts=max(restarts, _LOST_HOSTS) if hosts.may_change else restarts,
        monitor_interval=_PACE,
        logs_specs=DefaultLogsSpecs(),
    )


def _rank_command() -> Sequence[str]:
    """This very command, without what says where the hosts meet."""
    arguments, skip = [], False
    for argument in sys.argv[1:]:
        name = argument.replace("_", "-").partition("=")[0]
        if skip or name in _OPTIONS:
            skip = not skip and "=" not in argument
            continue
        arguments.append(argument)
    return ["-u", "-m", "samecurve", *arguments]


def _launch(config: "LaunchConfig") -> int:
    """Run torch's agent until all ranks have ended. Returns the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousConnectionError,
        RendezvousError,
    )
    from torch.distributed.launcher.api import elastic_launch

    try:
        elastic_launch(config, sys.executable)(*_rank_command())
    except RendezvousConnectionError as error:
        if not config.rdzv_configs.pop("is_host", False):
            raise _not_met(error) from None
        # another agent of this machine has just begun to serve the port
        return _launch(replace(config, rdzv_configs={**config.rdzv_configs, "is_host": False}))
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _explain(rank, failure.exitcode)
    except RendezvousError as error:
        raise _not_met(error) from None
    return 0


def _not_met(error: Exception) -> RunError:
    cause = str(error.__cause__ or error).splitlines()
    return RunError(
        f"the hosts did not meet: {cause[0] if cause else error!r}",
        "the first host's terminal says why it ended, if it has; the same command goes on",
        "--rdzv",
        again=True,
    )


def _explain(rank: int, code: int) -> int:
    """Say which rank of this host has failed. The first rank's terminal says why."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    echo(
        f"error: rank {rank} on {socket.gethostname()} left with {how}\n  remedy: the terminal of"
        " rank 0's host says why; the same command goes on from the last save",
        err=True,
    )
    return 1 if code < 0 else code
