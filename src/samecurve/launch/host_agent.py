"""torch's elastic agent for the ranks of one host, which notices trouble on other hosts in seconds.

torch's own agent starts each rank as a new interpreter, and waits for its ranks to notice that
another host has lost one, or is lost itself: a rank in a collective may wait for minutes. This
agent forks its ranks from a warm process. Where a rank fails, its agent tells the other agents,
and they end their ranks; where a host's agent is silent, the others do the same.
"""

import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from samecurve.launch.rendezvous_state import leave_hosts, present_hosts
from samecurve.processes import (
    Call,
    ForkServer,
    Process,
    child_environment,
    how_ended,
    signal_group,
    start_process,
    wait_for,
)
from samecurve.terminal import echo

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_FAILED = "samecurve/failed"  # in the store of one round: what has failed
_LEFT = "samecurve/left"  # in the store of one round: a host leaves in order
_END = "samecurve/end"  # in the store of one round: the exit code of a run that ended for good
_HEARD = "samecurve/heard"  # in the store of one round: how many hosts know of its end
_HEAR = 5.0  # seconds in which they hear of it
_LOOK = 0.5  # seconds between two looks at the other hosts
_LAST_WORDS = 2.0  # seconds in which ranks that lost another one say so, and leave


class HostAgent(SimpleElasticAgent):
    """Starts the ranks of this host, and starts them again with those of the other hosts.

    trouble: what has ended this start of all ranks, in words; '': nothing has.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rank: Call,
        server: ForkServer | None,
        *,
        ended: Path,
        silence: float,
    ) -> None:
        """rank: the process of a rank. server: forks it; None: it is started.

        ended: has the exit code of ranks that ended for good, if there is such a file
        silence: seconds after which a host is lost
        """
        super().__init__(spec)
        self._rank, self._server = rank, server
        self._ended, self._silence = ended, silence
        self._ranks: Sequence[Process] = []
        self._hosts: Mapping[object, str] | None = None  # of this round; None: have fixed numbers
        self._next_look = 0.0
        self._end_at: float | None = None  # when ranks that are still there are killed
        self.trouble = ""

    def ask_to_leave(self) -> bool:
        """Ask the ranks to save and leave. False: there are none."""
        _ask_to_leave(self._ranks)
        return any(rank.poll() is None for rank in self._ranks)

    def leave(self) -> None:
        """Leave the other hosts, once the ranks have ended."""
        with suppress(RuntimeError):  # the first host is gone
            if self._round:
                self._round.set(_LEFT, socket.gethostname())
            leave_hosts(self._worker_group.spec.rdzv_handler)

    # what torch's agent asks for

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.trouble, self._end_at, self._next_look = "", None, 0.0
        self._hosts = present_hosts(worker_group.spec.rdzv_handler)
        ranks = []
        for worker in worker_group.workers:
            variables = self._variables(worker_group)
            variables |= {
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "ROLE_RANK": str(worker.role_rank),
                "WORLD_SIZE": str(worker.world_size),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
            }
            call = replace(self._rank, environment=child_environment(**variables))
            ranks.append(start_process(call, server=self._server, stdin=DEVNULL))
            self._ranks = ranks
        return {local: rank.pid for local, rank in enumerate(ranks)}

    def _variables(self, worker_group: WorkerGroup) -> dict[str, str]:
        """The variables of torchrun that all ranks of this host share."""
        spec = worker_group.spec
        handler = spec.rdzv_handler
        return {
            "GROUP_RANK": str(worker_group.group_rank),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "MASTER_ADDR": str(worker_group.master_addr),
            "MASTER_PORT": str(worker_group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(handler.use_agent_store),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = [rank.poll() for rank in self._ranks]
        failures = {
            worker.global_rank: ProcessFailure(
                worker.local_rank, self._ranks[worker.local_rank].pid, code, ""
            )
            for worker, code in zip(worker_group.workers, codes, strict=True)
            if code
        }
        if failures:
            self._tell(failures)
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if all(code == 0 for code in codes):
            returned = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=returned)
        self._look_at_others(worker_group)
        if self._end_at is not None and time.monotonic() > self._end_at:
            _kill(self._ranks)
        return RunResult(state=WorkerState.HEALTHY)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.trouble:
            echo(f"again  {self.trouble}; all ranks start again from the last save", err=True)
        super()._restart_workers(worker_group)

    def _stop_workers(self, _worker_group: WorkerGroup, *_: object) -> None:
        """End the ranks of this host. Where nothing has failed, they save first."""
        if self.trouble:
            _end(self._ranks, _LAST_WORDS)
            return
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """Have the ranks save and leave; after so many seconds they are killed."""
        del death_sig
        _ask_to_leave(self._ranks)
        _end(self._ranks, timeout)

    def _exit_barrier(self) -> None:
        """Wait for the other hosts, so that all end together.

        Where the run has ended for good, other hosts may be about to start again, or be lost: they
        are told, and waited for only a few seconds.
        """
        try:
            code: int | None = int(self._ended.read_text())
        except (OSError, ValueError):
            code = None
        if code is None or self._round is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
            return
        store, handler = self._round, self._worker_group.spec.rdzv_handler
        num_hosts = self._worker_group.group_world_size or 0
        with suppress(RuntimeError):  # the first host has heard it from another, and is gone
            store.set(_END, str(code))
            handler.set_closed()  # type: ignore[no-untyped-call]
            store.add(_HEARD, 1)
            until = time.monotonic() + _HEAR
            while store.add(_HEARD, 0) < num_hosts and time.monotonic() < until:
                time.sleep(0.1)

    def read_end(self) -> int | None:
        """The exit code with which another host has ended the run for all; None: it hasn't."""
        with suppress(RuntimeError):
            if self._round and self._round.check([_END]):
                self._round.add(_HEARD, 1)
                return int(self._round.get(_END))
        return None

    @property
    def _round(self) -> "Store | None":
        """The store of this round of ranks; None: no round has begun."""
        store: Store | None = self._worker_group.store
        return store

    def _construct_event(self, *_: object, **__: object) -> Event:
        """An event that nobody reads: torch's would look this host's name up, each time."""
        return Event("samecurve", EventSource.AGENT)

    # trouble

    def _tell(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Tell the other hosts that ranks of this host have failed."""
        if self.trouble:
            return
        rank, failure = next(iter(failures.items()))
        code = failure.exitcode
        self._agree(f"rank {rank} on {socket.gethostname()} ended with {how_ended(code)}")

    def _agree(self, trouble: str) -> None:
        """Tell all hosts what has ended this start, unless another host was first."""
        self.trouble = trouble
        if self._hosts is not None and self._round:
            with suppress(RuntimeError):  # the first host is gone: the next look ends this agent
                self.trouble = self._round.compare_set(_FAILED, "", trouble).decode()

    def _look_at_others(self, worker_group: WorkerGroup) -> None:
        """Look whether another host has lost a rank, or is lost."""
        if self._hosts is None or self.trouble or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK
        store = self._round
        assert store
        with suppress(RuntimeError):  # the first host is gone: the next look ends this agent
            if store.check([_FAILED]):
                self.trouble = store.get(_FAILED).decode()
                self._end_at = time.monotonic() + _LAST_WORDS
                return
            lost = self._lost_hosts(worker_group)
            if lost and not store.check([_LEFT]):
                self._end_at = time.monotonic()  # ranks that wait for its ranks can do no more
                self._agree(f"{lost} has been silent for {self._silence:g} s")

    def _lost_hosts(self, worker_group: WorkerGroup) -> str:
        """The addresses of the hosts that torch has left out of this round."""
        present = present_hosts(worker_group.spec.rdzv_handler) or {}
        lost = [address for agent, address in (self._hosts or {}).items() if agent not in present]
        return ", ".join(sorted(lost))


def _ask_to_leave(ranks: Sequence[Process]) -> None:
    """Ask the ranks that live to save and leave."""
    for rank in ranks:
        with suppress(OSError):
            rank.send_signal(signal.SIGTERM)


def _kill(ranks: Sequence[Process]) -> None:
    """Kill the ranks, with all that they have started."""
    for rank in ranks:
        signal_group(rank.pid)


def _end(ranks: Sequence[Process], seconds: float) -> None:
    """Wait until the ranks have ended; kill those that have not after so many seconds."""
    wait_for(ranks, seconds)
    _kill(ranks)
    for rank in ranks:
        rank.wait()
