"""torch's NCCL process group, emulated over Gloo: its operations.

`install` makes `dist.init_process_group("nccl")` work in a CPU build of torch. nccl_rules.py has
what NCCL refuses; nccl_group.py queues the calls; communicator.py runs them; exchange.py computes
them; nccl_watch.py sees what hangs.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import emulated_cuda_native as native
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from samecurve_products.rehearse.emulated_cuda import gloo_on_cuda, nccl_watch
from samecurve_products.rehearse.emulated_cuda.communicator import Call, Message, Pending, joined
from samecurve_products.rehearse.emulated_cuda.exchange import Exchange, reduction_of
from samecurve_products.rehearse.emulated_cuda.nccl_group import NcclGroup
from samecurve_products.rehearse.emulated_cuda.nccl_rules import (
    check_list,
    check_single,
    check_splits,
)

VERSION = (2, 28, 9)
_DEFAULT_TIMEOUT = timedelta(minutes=10)


class ProcessGroupNCCL(NcclGroup):
    """The NCCL backend of one process group, with the methods of torch's Backend."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Pending | None:
        opts = opts or dist.AllreduceOptions()
        call = self._all_reduce("ALLREDUCE", "all_reduce", tensors[0], opts.reduceOp)
        return self._submit([call], opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Pending | None:
        check_list(tensors)
        opts = opts or dist.AllreduceCoalescedOptions()
        title = "allreduce_coalesced"
        calls = [self._all_reduce("COALESCED", title, tensor, opts.reduceOp) for tensor in tensors]
        return self._submit(calls, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Pending | None:
        opts = opts or dist.BroadcastOptions()
        tensor, root = _as_pairs(tensors[0]), int(opts.rootRank + opts.rootTensor)
        check_single(tensor)
        view = _view(tensor)
        inputs, outputs = ([tensor], []) if self.rank() == root else ([], [tensor])
        call = Call(
            "BROADCAST",
            "nccl:broadcast",
            inputs,
            outputs,
            lambda exchange: exchange.broadcast(view, root),
            _alike("broadcast", tensor, root),
        )
        return self._submit([call], opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Pending | None:
        opts = opts or dist.ReduceOptions()
        tensor, root = _as_pairs(tensors[0]), int(opts.rootRank + opts.rootTensor)
        check_single(tensor)
        reduction, view = reduction_of(opts.reduceOp, tensor.dtype), _view(tensor)

        def run(exchange: Exchange) -> None:
            scaled = reduction.scaled(view)
            exchange.reduce_to(scaled, root, reduction)
            if exchange.rank == root and scaled is not view:
                view.copy_(scaled)

        outputs = [tensor] if self.rank() == root else []
        agreed = _alike("reduce", tensor, root, opts.reduceOp)
        call = Call("REDUCE", "nccl:reduce", [tensor], outputs, run, agreed)
        return self._submit([call], opts)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Pending | None:
        [filled], [sent] = outputs, inputs
        check_single(sent)
        check_list(filled)
        if len(filled) != self.size():
            raise ValueError("Tensor list input to allgather must match world size")
        views, own = [_view(tensor) for tensor in filled], _view(sent)
        if len({tensor.numel() for tensor in filled}) == 1:
            operation, title = "ALLGATHER", "nccl:all_gather"
        else:  # torch broadcasts each one where sizes differ
            operation, title = "COALESCED", "nccl:all_gather_uneven"
        agreed = f"all_gather {sent.dtype} {[tensor.numel() for tensor in filled]}"
        call = Call(
            operation,
            title,
            [sent],
            filled,
            lambda exchange: exchange.all_gather(views, own),
            agreed,
        )
        return self._submit([call], opts)

    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Pending | None:
        return self._submit([self._gather_into("_ALLGATHER_BASE", output, tensor)], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Pending | None:
        pairs = zip(outputs, inputs, strict=True)
        calls = [self._gather_into("COALESCED", output, tensor) for output, tensor in pairs]
        return self._submit(calls, opts)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Pending | None:
        opts = opts or dist.ReduceScatterOptions()
        [output], [parts] = outputs, inputs
        check_single(output)
        check_list(parts)
        return self._submit([_scatter_sum("REDUCE_SCATTER", output, parts, parts, opts)], opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Pending | None:
        opts = opts or dist.ReduceScatterOptions()
        return self._submit(
            [self._scatter_from("_REDUCE_SCATTER_BASE", output, tensor, opts)], opts
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Pending | None:
        opts = opts or dist.ReduceScatterOptions()
        pairs = zip(outputs, inputs, strict=True)
        calls = [self._scatter_from("COALESCED", output, tensor, opts) for output, tensor in pairs]
        return self._submit(calls, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Pending | None:
        check_single(output)
        check_single(tensor)
        received = _view(output).split(check_splits(output_sizes, output, self.size()))
        sent = _view(tensor).split(check_splits(input_sizes, tensor, self.size()))
        call = self._all_to_all("ALLTOALL_BASE", [output], [tensor], received, sent)
        return self._submit([call], opts)

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Pending | None:
        check_list([*outputs, *inputs])
        received, sent = [_view(t) for t in outputs], [_view(t) for t in inputs]
        return self._submit([self._all_to_all("ALLTOALL", outputs, inputs, received, sent)], opts)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Pending | None:
        opts = opts or dist.GatherOptions()
        [sent], root = inputs, int(opts.rootRank)
        filled = outputs[0] if self.rank() == root else []
        check_list([sent, *filled])
        own, views = _view(sent), [_view(tensor) for tensor in filled]
        nothing = own[:0] if own.dim() else own.view(-1)[:0]

        def run(exchange: Exchange) -> None:
            sends = [own if rank == root else nothing for rank in range(exchange.size)]
            exchange.all_to_all(views or [nothing] * exchange.size, sends)

        call = Call("GATHER", "nccl:gather", [sent], filled, run, _alike("gather", sent, root))
        return self._submit([call], opts)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Pending | None:
        opts = opts or dist.ScatterOptions()
        [filled], root = outputs, int(opts.rootRank)
        parts = inputs[0] if self.rank() == root else []
        check_list([filled, *parts])
        view, views = _view(filled), [_view(tensor) for tensor in parts]
        nothing = view.view(-1)[:0]

        def run(exchange: Exchange) -> None:
            receives = [view if rank == root else nothing for rank in range(exchange.size)]
            exchange.all_to_all(receives, views or [nothing] * exchange.size)

        call = Call(
            "SCATTER", "nccl:scatter", parts, [filled], run, _alike("scatter", filled, root)
        )
        return self._submit([call], opts)

    def send(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> Pending | None:
        return self._message(tensors[0], peer, sends=True)

    def recv(self, tensors: list[torch.Tensor], peer: int, _tag: int) -> Pending | None:
        return self._message(tensors[0], peer, sends=False)

    def barrier(self, opts: Any = None) -> Pending | None:
        opts = opts or dist.BarrierOptions()
        device = self.bound_device_id or torch.device("cuda", torch.cuda.current_device())
        if opts.device_ids:
            device = torch.device("cuda", opts.device_ids[0])
        flag = torch.zeros(1, device=device)
        call = self._all_reduce(
            "BARRIER", "all_reduce_barrier", flag, dist.AllreduceOptions().reduceOp
        )
        pending = self._submit([call], opts)
        if pending is not None:
            pending.is_barrier = True
        return pending

    # The calls that several operations make.

    def _all_reduce(self, operation: str, title: str, tensor: torch.Tensor, how: Any) -> Call:
        tensor = _as_pairs(tensor)
        check_single(tensor)
        reduction, view = reduction_of(how, tensor.dtype), _view(tensor)

        def run(exchange: Exchange) -> None:
            scaled = reduction.scaled(view)
            if scaled is not view:
                view.copy_(scaled)
            exchange.all_reduce(view, reduction)

        agreed = _alike(title, tensor, None, how)
        return Call(operation, f"nccl:{title}", [tensor], [tensor], run, agreed)

    def _gather_into(self, operation: str, output: torch.Tensor, tensor: torch.Tensor) -> Call:
        check_single(tensor)
        check_single(output)
        if tensor.dtype != output.dtype:
            raise TypeError("output tensor must have the same type as input tensor")
        if tensor.numel() * self.size() != output.numel():
            raise ValueError(
                "output tensor size must be equal to world_size times input tensor size"
            )
        parts, own = _view(output).view(-1).chunk(self.size()), _view(tensor).view(-1)
        agreed = _alike("all_gather_into_tensor", tensor)
        return Call(
            operation,
            "nccl:_all_gather_base",
            [tensor],
            [output],
            lambda exchange: exchange.all_gather(parts, own),
            agreed,
        )

    def _scatter_from(
        self, operation: str, output: torch.Tensor, tensor: torch.Tensor, opts: Any
    ) -> Call:
        check_single(output)
        check_single(tensor)
        if tensor.dtype != output.dtype:
            raise TypeError("input tensor must be the same type as the output tensor.")
        if tensor.numel() != output.numel() * self.size():
            raise ValueError("input tensor must be the same size as output size times world size")
        parts = tensor.detach().view(-1).chunk(self.size())
        return _scatter_sum(operation, output, [tensor], parts, opts)

    def _all_to_all(
        self,
        operation: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        received: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor],
    ) -> Call:
        peers = [peer for peer in range(self.size()) if peer != self.rank()]
        return Call(
            operation,
            "nccl:all_to_all",
            inputs,
            outputs,
            lambda exchange: exchange.all_to_all(received, sent),
            f"all_to_all {inputs[0].dtype}",
            sends={peer: [sent[peer].numel()] for peer in peers},
            receives={peer: [received[peer].numel()] for peer in peers},
        )

    def _message(self, tensor: torch.Tensor, peer: int, *, sends: bool) -> Pending | None:
        check_single(tensor, peer_to_peer=True)
        message = Message(tensor, _view(tensor), peer, sends)
        if self._batch is not None:
            self._batch.append(message)
            return None
        pair = (min(peer, self.rank()), max(peer, self.rank()))
        return self._submit([joined([message], self.rank())], None, pair)


def _scatter_sum(
    operation: str,
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    parts: Sequence[torch.Tensor],
    opts: Any,
) -> Call:
    """A reduce-scatter. inputs: the tensors whose parts, one for each rank, are reduced."""
    reduction, view = reduction_of(opts.reduceOp, output.dtype), _view(output)
    views = [_view(part) for part in parts]

    def run(exchange: Exchange) -> None:
        scaled = [reduction.scaled(part) for part in views]
        view.copy_(exchange.reduce_scatter(scaled, reduction).view(view.shape))

    agreed = _alike("reduce_scatter", output, None, opts.reduceOp)
    return Call(operation, "nccl:_reduce_scatter_base", inputs, [output], run, agreed)


def _view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, as the host's threads may use it while the view lives."""
    view: torch.Tensor = native.host_view(tensor.detach())
    return view


def _as_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers, as torch passes it to NCCL."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _alike(name: str, tensor: torch.Tensor, root: int | None = None, how: Any = None) -> str:
    """What all ranks must give alike to a collective."""
    source = "" if root is None else f", root {root}"
    reduction = "" if how is None else f", {how.__getstate__()[0]}"
    return f"{name} of {tensor.numel()} {tensor.dtype}{source}{reduction}"


def install() -> None:
    """Give torch the NCCL backend. Called once, after torch.cuda has its devices."""
    ProcessGroupNCCL.__module__ = "torch.distributed.distributed_c10d"
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    c10d.default_pg_nccl_timeout = _DEFAULT_TIMEOUT
    torch.cuda.nccl.version = lambda: VERSION
    nccl_watch.install()
    gloo_on_cuda.install()
