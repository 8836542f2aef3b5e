"""The engine's libraries, imported while the command still reads its config and plans.

Several ranks, and what describes the task, are forked from one process that has them. A rank alone
trains in the process of its command, which imports them itself in the meantime.
"""

import threading
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING

from samecurve.run.fork_server import ForkServer, fork_server

if TYPE_CHECKING:  # takes as long to import as to begin
    from samecurve.core.planning.plan import Plan

_FIRST = ("torch", "samecurve.run.describe", "samecurve.tasks.adapter.torch_adapter")
# what a rank needs beside that; numpy imports its masked arrays with the first np.unique
_RANK = ("samecurve.worker.main", "samecurve.torch_engine.engine", "numpy.ma")


class WarmStart:
    """Of one command. Leaves a process behind only until the block's end."""

    def __init__(self) -> None:
        self.server: ForkServer | None = None
        self._imports: threading.Thread | None = None  # in this process

    def __enter__(self) -> "WarmStart":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if self._imports:  # an interpreter that ends beneath it would print its traceback
            self._imports.join()

    def begin(self) -> None:
        """With torch. stop(), where another engine is wanted."""
        self.server = fork_server(_FIRST)

    def stop(self) -> None:
        if self.server:
            self.server.close()
        self.server = None

    def expect(self, plan: "Plan") -> None:
        """Get ready for a plan's devices and strategy."""
        if self.server is None:
            return
        if plan.is_one_process:
            self._imports = threading.Thread(target=import_module, args=(_RANK[1],), name="imports")
            self._imports.start()
            return
        # what torch's wrapper of a model on several ranks imports, once it is made
        wrapper = "torch.distributed.fsdp" if plan.shards > 1 else "torch._dynamo"
        self.server.preload((*_RANK, wrapper))
