"""The early imports of a command: the engine, while the command still reads its config and plans.

The processes that need the engine are forked from a server that imports it
(processes/server.py). A single rank trains in the process of the command, which imports the
engine in a thread.
"""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from samecurve.errors import Interrupted
from samecurve.processes import ForkServer, fork_server, import_ahead

if TYPE_CHECKING:  # importing it takes as long as beginning
    from samecurve.core.planning.layout import Layout

FIRST = ("torch", "samecurve.tasks.adapter.torch_adapter")
DESCRIBES = "samecurve.run.describe"
_ENGINE = "samecurve.torch_engine.engine"
# a call waits for its own module, and so for all modules before it
_TRAINS = "samecurve.worker.rank_main"
# of a command that is one rank of several; the last of them is called
_COMMAND = ("samecurve.launch.external", "samecurve.cli.train", "samecurve.cli.entry")


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
        # else an interpreter that ends meanwhile prints the thread's traceback; an interrupted
        # command doesn't wait for its interpreter to end
        if self._imports and not isinstance(error, Interrupted):
            self._imports.join()

    def begin(self) -> None:
        """Begin to import torch. To be stopped where another engine is wanted."""
        self.server = fork_server(FIRST)

    def stop(self) -> None:
        if self.server:
            self.server.close()
        self.server = None

    def expect(self, layout: "Layout", libraries: Sequence[str], *, may_grow: bool = False) -> None:
        """Import what the layout needs, and `libraries`, modules that the task imports.

        may_grow: whether the plan may take several ranks where the layout has one
        """
        if self.server is None:
            return
        described = (*libraries, DESCRIBES)
        if layout.is_one_process:
            if may_grow:
                described = (*described, _ENGINE, "numpy.ma", _TRAINS)
            self.server.preload(described)
            # without the libraries: transformers can't be imported by two threads at once
            self._imports = threading.Thread(target=import_ahead, args=(_ENGINE,), name="imports")
            self._imports.start()
            return
        # the first np.unique imports numpy's masked arrays
        self.server.preload((*described, _ENGINE, "numpy.ma", _TRAINS))

    def wait_for_imports(self) -> None:
        """Wait for what is imported in this process: two threads can't import torch at once."""
        if self._imports:
            self._imports.join()

    def expect_command(self, libraries: Sequence[str]) -> None:
        """Import what commands need that train as ranks of any strategy.

        libraries: modules that the task imports
        """
        if self.server is None:
            return
        engine = (*libraries, DESCRIBES, _ENGINE, "numpy.ma", _TRAINS)
        self.server.preload((*engine, *_COMMAND))

    def wait_for_command(self) -> None:
        """Wait until a command of expect_command() can start at once."""
        if self.server:
            self.server.wait(_COMMAND[-1])
