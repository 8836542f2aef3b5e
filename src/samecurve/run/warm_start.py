"""Imports of the engine's libraries while the command still reads its config and plans.

Several ranks, and the process that describes the task, are forked from a process that has imported
the libraries. A single rank trains in the process of the command, which imports them in a thread.
"""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from samecurve.run.fork_server import ForkServer, fork_server, import_ahead

if TYPE_CHECKING:  # importing it takes as long as beginning
    from samecurve.core.planning.layout import Layout

_FIRST = ("torch", "samecurve.tasks.adapter.torch_adapter")
_ENGINE = "samecurve.torch_engine.engine"
# a call waits for its own module, and so for all modules before it
_DESCRIBES, _TRAINS = "samecurve.run.describe", "samecurve.worker.rank_main"


class WarmStart:
    """The early imports of one command. Their process ends with the block."""

    def __init__(self) -> None:
        self.server: ForkServer | None = None
        self._imports: threading.Thread | None = None  # imports in this process

    def __enter__(self) -> "WarmStart":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if self._imports:  # else an interpreter that ends meanwhile prints the thread's traceback
            self._imports.join()

    def begin(self) -> None:
        """Begin to import torch. To be stopped where another engine is wanted."""
        self.server = fork_server(_FIRST)

    def stop(self) -> None:
        if self.server:
            self.server.close()
        self.server = None

    def expect(self, layout: "Layout", libraries: Sequence[str]) -> None:
        """Import what the layout needs, and `libraries`, modules that the task imports."""
        if self.server is None:
            return
        described = (*libraries, _DESCRIBES)
        if layout.is_one_process:
            self.server.preload(described)
            # without the libraries: transformers can't be imported by two threads at once
            self._imports = threading.Thread(target=import_ahead, args=(_ENGINE,), name="imports")
            self._imports.start()
            return
        # torch's wrapper of a model on several ranks imports these modules, and the first np.unique
        # imports numpy's masked arrays
        wrapper = "torch.distributed.fsdp" if layout.shards > 1 else "torch._dynamo"
        self.server.preload((*described, _ENGINE, "numpy.ma", wrapper, _TRAINS))
