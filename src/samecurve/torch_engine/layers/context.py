"""What keyed and synchronised layers know of the microbatch in work."""

import torch

from samecurve.errors import UserError
from samecurve.torch_engine.compile_marks import constant


class MicroBatchContext:
    """The microbatch in work on one device: begin() before each forward pass, the next one only
    after backward.
    """

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None  # int64 [rows] on the device; None: nothing is keyed
        self.real = True  # False: a dummy, its results dropped
        self._calls: dict[str, int] = {}

    def begin(self, keys: torch.Tensor | None, *, real: bool = True) -> None:
        """keys: of core/determinism/sample_keys.py."""
        self.keys, self.real = keys, real
        self._calls = {}

    def call_number(self, name: str) -> int:
        """Which call of `name` in this forward pass this is, from 0.

        UserError: computed again in backward, and nobody can say which of several calls that is.
        """
        calls = self._calls.get(name, 0)
        if not recomputing():
            self._calls[name] = calls + 1
            return calls
        if calls != 1:
            raise UserError(
                f"{name} is called {calls} times in a forward pass and computed again in backward,"
                " where its calls can't be told apart",
                "a module of its own for each call; or no activation recompute",
                "model",
            )
        return 0


@constant
def recomputing() -> bool:
    """Whether this is a forward pass inside of a backward pass: activation checkpointing computes a
    block again.
    """
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - torch has no public word for it
