"""The engine's libraries, imported while the command still reads its config and plans.

Several ranks, and what describes the task, are forked from one process that has them. A rank alone
trains in the process of its command, which imports them itself in the meantime.
"""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from samecurve.run.fork_server import ForkServer, fork_server, import_ahead

if TYPE_CHECKING:  # takes as long to import as to begin
    from samecurve.core.planning.plan import Plan

_FIRST = ("torch", "samecurve.tasks.adapter.torch_adapter")
_ENGINE = "samecurve.torch_engine.engine"
# a call waits for its own module, and so for what stands before it
_DESCRIBES, _TRAINS = "samecurve.run.describe", "samecurve.worker.main"


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

    def expect(self, plan: "Plan", libraries: Sequence[str]) -> None:
        """Get ready for a plan's devices and strategy.

        libraries: modules that the task's class imports
        """
        if self.server is None:
            return
        described = (*libraries, _DESCRIBES)
        if plan.is_one_process:
            self.server.preload(described)
            # without the libraries: transformers can't be imported by two threads at once
            self._imports = threading.Thread(target=import_ahead, args=(_ENGINE,), name="imports")
            self._imports.start()
            return
        # what torch's wrapper of a model on several ranks imports, once it is made; and numpy's
        # masked arrays, with the first np.unique
        wrapper = "torch.distributed.fsdp" if plan.shards > 1 else "torch._dynamo"
        self.server.preload((*described, _ENGINE, "numpy.ma", wrapper, _TRAINS))
