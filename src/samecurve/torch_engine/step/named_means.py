"""The means that a task's loss gives beside it: the same names in every microbatch, on every rank,
since each rank adds up what the others counted.
"""

import json
from collections.abc import Mapping

import torch

from samecurve.core.determinism.mean import Mean
from samecurve.core.named_means import check_names, other_names
from samecurve.torch_engine.process_group import Comm


class NamedMeans:
    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None  # None: this rank has seen no microbatch

    @property
    def names(self) -> tuple[str, ...]:
        """Without the loss, in the order of in_order()."""
        return self._names or ()

    def in_order(self, losses: Mapping[str, Mean]) -> list[Mean]:
        """A microbatch's, the loss first. UserError: another one had other names."""
        if self._names is None:
            self._names = tuple(sorted(losses.keys() - {"loss"}))
        check_names(losses, self._names)
        return [losses["loss"], *(losses[name] for name in self._names)]

    def agree(self, comm: Comm, device: torch.device) -> None:
        """Once each rank has done its first step: who had no microbatch learns the names.

        UserError, on every rank: they differ.
        """
        if comm.group is None:
            return
        text = b"" if self._names is None else json.dumps(self._names).encode()
        sizes = torch.zeros(comm.world_size, dtype=torch.float64, device=device)
        sizes[comm.rank] = len(text)
        longest = int(comm.all_reduce(sizes)().max())
        table = torch.zeros(comm.world_size, longest, dtype=torch.float64, device=device)
        if longest > len(b"[]"):
            table[comm.rank, : len(text)] = torch.tensor(list(text)).to(table)
            table = comm.all_reduce(table)()
            rows = [bytes(map(int, row)).rstrip(b"\0") for row in table.tolist()]
            lists = {tuple(json.loads(row)) for row in rows if row}
            if len(lists) > 1:
                one, other, *_ = sorted(lists)
                raise other_names(["loss", *one], ["loss", *other])
            (self._names,) = lists
