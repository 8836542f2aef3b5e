"""`samecurve train --nnodes`: this host's part of a run on several hosts.

torch's elastic agent starts the ranks of this host, and finds the other hosts. Each rank is the
same command without these options, which takes its place from the environment as under torchrun.
When a host is lost, or comes, the agents start all ranks again: the run goes on from its last save,
with the same global batch, hence with the same curve.
"""

import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from samecurve.core.config.loading import LoadedConfig
from samecurve.core.planning.machine import choose_devices
from samecurve.errors import START_AGAIN, Interrupted, RunError
from samecurve.launch import Signals, kill_children, stopping
from samecurve.launch.host_agent import HostAgent
from samecurve.launch.network import use_interface
from samecurve.launch.nodes import REACHED, Hosts, Way
from samecurve.launch.rank_agreement import check_host_agrees
from samecurve.probe import probe
from samecurve.processes import Call
from samecurve.run.warm_start import WarmStart
from samecurve.tasks import entry_of
from samecurve.terminal import echo
from samecurve.worker import ENDED, FACTS, GROUP, LEAVES

# seconds
_MORE_HOSTS = 3.0  # in which more hosts may come once there are enough
_BEAT, _MISSED = 2, 4  # between an agent's signs of life; that many missing: its host is lost
_LOST_HOSTS = 1000  # starts again, at most, where the number of hosts may change
_PACE = 0.1  # between an agent's looks at its ranks
_ANSWER = timedelta(seconds=60)  # of the first host
# torch's words where the host that serves the meeting place has gone
_IS_GONE = re.compile(r"got 0 bytes|Connection (closed|reset|refused)|Broken pipe")
_OPTIONS = ("--nnodes", "--rdzv", "--node-rank")


def run_on_hosts(
    loaded: LoadedConfig, hosts: Hosts, way: Way, warm_start: WarmStart, *, headless: bool
) -> int:
    """Train with the ranks of this host, and of others that run the same command.

    warm_start: has begun to import the engine

    Returns the exit code. UserError: this host has no such devices, or runs something else than the
    hosts that are there. RunError: a rank has failed for good, or the first host does not answer.
    """
    devices = choose_devices(loaded.config.devices, loaded.config.engine, probe()).value
    ranks = len(devices) if loaded.config.engine == "torch" else 1
    warm_start.expect_command(entry_of(loaded.config.task).libraries)
    if not headless:
        echo(_hosts_line(hosts, way, ranks))
    with TemporaryDirectory(prefix="samecurve-") as scratch:
        ended = Path(scratch) / "ended"
        for name, value in _environment(hosts, Path(scratch), ended).items():
            os.environ.setdefault(name, value)
        use_interface(way.interface, os.environ)
        handler = _open_rendezvous(hosts, way)
        if hosts.may_change:
            place = TCPStore(hosts.host, hosts.port, wait_for_workers=False, timeout=_ANSWER)
            check_host_agrees(place, loaded, ranks)
            warm_start.wait_for_command()  # the others train meanwhile
        restarts = loaded.config.devices.max_restarts
        spec = WorkerSpec(
            role="samecurve",
            local_world_size=ranks,
            entrypoint=sys.executable,  # not used: the agent starts ranks in its own way
            rdzv_handler=handler,
            max_restarts=max(restarts, _LOST_HOSTS) if hosts.may_change else restarts,
            monitor_interval=_PACE,
            master_addr=hosts.host if hosts.index is not None else None,
            master_port=hosts.port if hosts.index is not None else None,
            local_addr=way.interface.address,
        )
        words = _rank_words()
        rank = Call("samecurve.cli.entry", words, "run_words", new_session=True, unbuffered=True)
        silence = _BEAT * _MISSED
        agent = HostAgent(spec, rank, warm_start.server, ended=ended, silence=silence)
        code = _run(agent, hosts)
        with suppress(OSError, ValueError):  # no rank has said that it ended for good
            code = int(ended.read_text())
    if code > 128:
        others = "the others go on; " if hosts.may_change else ""
        echo(f"left   {others}the same command goes on from the last save", err=True)
    return code


def _hosts_line(hosts: Hosts, way: Way, ranks: int) -> str:
    number = f"{hosts.least} to {hosts.most}" if hosts.may_change else str(hosts.most)
    return (
        f"hosts  {number}, {ranks} ranks on each; this one is {socket.gethostname()}, and meets"
        f" the others at {hosts.host}:{hosts.port} over"
        f" {way.interface.name or way.interface.address}"
    )


def _environment(hosts: Hosts, scratch: Path, ended: Path) -> dict[str, str]:
    """The variables of this host's ranks."""
    added = {
        GROUP: f"{hosts.host}:{hosts.port}",
        ENDED: str(ended),
        FACTS: str(scratch),
        # each start has a store of its own, at a new port
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if hosts.may_change:
        added[LEAVES] = "1"
    return added


def _rank_words() -> Sequence[str]:
    """The arguments of this very command, without what says where the hosts meet."""
    arguments, skip = [], False
    for argument in sys.argv[1:]:
        name = argument.replace("_", "-").partition("=")[0]
        if skip or name in _OPTIONS:
            skip = not skip and "=" not in argument
            continue
        arguments.append(argument)
    return arguments


def _open_rendezvous(hosts: Hosts, way: Way) -> RendezvousHandler:
    """torch's rendezvous of the hosts. RunError: the first host does not answer."""
    for name in ("torch.distributed.elastic", SimpleElasticAgent.__module__):  # each has a level
        logging.getLogger(name).setLevel(logging.CRITICAL)
    backend: dict[str, Any] = {
        "backend": "c10d",
        "is_host": way.is_first,
        "last_call_timeout": _MORE_HOSTS,
        "join_timeout": REACHED,
        "keep_alive_interval": _BEAT,
        "keep_alive_max_attempt": _MISSED,
    }
    if hosts.index is not None:
        backend = {"backend": "static", "rank": hosts.index, "timeout": REACHED}
    endpoint = f"[{hosts.host}]" if ":" in hosts.host else hosts.host
    parameters = RendezvousParameters(
        endpoint=f"{endpoint}:{hosts.port}",
        run_id=f"samecurve-{hosts.port}",
        min_nodes=hosts.least,
        max_nodes=hosts.most,
        local_addr=way.interface.address,
        **backend,
    )
    try:
        return get_rendezvous_handler(parameters)
    except RendezvousConnectionError as error:
        if not way.is_first:
            raise _not_met(error, hosts) from None
    # another agent of this machine has just begun to serve the port
    return _open_rendezvous(hosts, replace(way, is_first=False))


def _run(agent: HostAgent, hosts: Hosts) -> int:
    """Run the agent until all its ranks have ended. Returns the exit code."""

    def stop() -> None:
        """Stop the run on all hosts, or only leave them, where others may go on."""
        if hosts.may_change:
            raise SignalException("asked to leave", signal.Signals(signals.received or 0))
        # the ranks hear of it, not the agent: all leave in order, and all agents end together; an
        # agent that had gone ahead would be waited for
        if not agent.ask_to_leave():
            raise Interrupted(signals.received or signal.SIGINT)
        with suppress(OSError):
            os.write(2, stopping())

    closes = True
    try:
        with Signals(stop, kill_children) as signals:
            code = _code_of(agent, agent.run())
        return 128 + signals.received if signals.received and code == 0 else code
    except SignalException as left:
        closes = False  # the others go on
        agent.leave()
        return 128 + int(left.sigval)
    except RendezvousClosedError as error:
        code_of_all = agent.read_end()
        if code_of_all is None:
            raise _not_met(error, hosts) from None
        return code_of_all
    except RendezvousError as error:
        raise _not_met(error, hosts) from None
    finally:
        if closes:
            with suppress(RendezvousError):
                agent.get_worker_group().spec.rdzv_handler.shutdown()


def _not_met(error: Exception, hosts: Hosts) -> RunError:
    text = str(error.__cause__ or error)
    cause = (text.splitlines() or [repr(error)])[0]
    if _IS_GONE.search(text):
        cause = f"the first host, {hosts.host}:{hosts.port}, has ended or can't be reached any more"
    return RunError(
        f"the hosts did not meet: {cause}",
        "that host's terminal says why it ended; give the same command there, then here",
        "--rdzv",
        again=True,
    )


def _code_of(agent: HostAgent, result: RunResult) -> int:
    """The exit code of ranks that have ended. Which of them has failed is said."""
    if not result.is_failed():
        return 0
    failures = sorted(result.failures.items())
    code = next((failure.exitcode for _, failure in failures), 1)
    echo(
        f"error: {agent.trouble or f'ranks of {socket.gethostname()} failed'}\n  remedy: the"
        " terminal of rank 0's host says more; the same command goes on from the last save",
        err=True,
    )
    return START_AGAIN if code < 0 else code
