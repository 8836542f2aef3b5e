"""Every rank compiles the same program for the same computation, in runs with the same bits.

What a compiler makes of a graph must follow from the graph and its shapes alone: nothing is chosen
by its time, no shape is dynamic, and the number of threads is the plan's. Whether it does is
checked: each rank notes the digest of a program's code where all ranks can read it, and a rank that
has compiled other code for the same graph refuses to go on, before it runs that code. So a program
for a new shape (the tail of an epoch, an evaluation) is checked as it comes.

Imported late: torch's compiler takes seconds.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch

# public in torch.distributed, where type checkers don't see them
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.codecache import get_path
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import (
    CppTorchOptions,
    get_compiler_version_info,
    get_cpp_compiler,
)
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.distributed.distributed_c10d import _get_default_store
from torch.fx import GraphModule

from samecurve.errors import NotSameBitsError, UserError
from samecurve.torch_engine.process_group import Comm

F = TypeVar("F", bound=Callable[..., Any])

# Settings of the compiler that decide bits, whatever the environment says. batch_invariant is not
# among them: a microbatch has the same shape on any devices.
_SETTINGS: dict[str, object] = {
    "deterministic": True,  # no choice by time, and one form of each reduction
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    "benchmark_epilogue_fusion": False,
    "benchmark_combo_kernel": False,
    "triton.multi_kernel": 0,
    "cpp.dynamic_threads": False,
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_floating_point_contract_flag": "off",
}
# What differs between two devices of one kind, and between two places of one file, in a text
_COMMENT = re.compile(r"^\s*# .*$", re.MULTILINE)
_FOLDER = re.compile(r'"/[^"\s]*/')
_DEVICE = re.compile(
    r"(?<=cuda:)\d+|(?<=index=)\d+|(?<=_DeviceGuard\()\d+|(?<=set_device\()\d+"
    r"|(?<=get_raw_stream\()\d+|(?<=\bstream)\d+|(?<=_stream_)\d+"
)
_LINE = re.compile(r'File "(?:.*[/\\])?([^/\\"]+)", line (\d+), in (\w+)')


class SamePrograms:
    """The backend of torch.compile in runs with the same bits, for all models of this process.

    digests: of each program's code, by the digest of its graph, in the order of first use
    """

    def __init__(self, comm: Comm, threads: int, device: torch.device) -> None:
        """Agree with the other ranks on a place for notes; all ranks call it together.

        threads: inside one device's operations

        UserError: this torch compiles what was fastest when it was tried.
        """
        known = inductor_config.get_config_copy()
        if device.type != "cpu" and "deterministic" not in known:
            raise NotSameBitsError(
                f"torch {torch.__version__} can't compile without choosing kernels by their time",
                "a newer torch (2.13 can), or leave --compile out",
                "train.compile",
            )
        settings = {**_SETTINGS, "cpp.threads": threads}
        self._settings = {name: value for name, value in settings.items() if name in known}
        self._tools = _cpp_tools() if device.type == "cpu" else torch.__version__
        self._rank = comm.rank
        self._notes = _shared_notes(comm, device)
        self.digests: dict[str, str] = {}

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        # programs of the cache for whole functions would not pass through _compile
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(
                graph,
                inputs,
                inner_compile=partial(self._compile, _place_of(graph)),
                config_patches=self._settings,
            )

    def _compile(
        self, place: str, graph: GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Any:
        """Compile a graph of forward or backward, or read what was compiled before.

        place: in the model's code
        """
        way = "backward" if options.get("is_backward") else "forward"
        asked = f"{way} {options.get('is_inference')} {options.get('static_input_idxs')}"
        key, what = _digest(asked + _text_of(graph)), f"{place} ({way})"
        program: Any = compile_fx_inner(graph, inputs, **options)
        code = getattr(program, "source_code", None)
        if code is not None:  # else the graph computes nothing
            path = get_path(program.cache_key, "py")[2]
            self._check(key, _digest(_without_places(code)), what, path)
        return program

    def _check(self, key: str, digest: str, what: str, path: str) -> None:
        """UserError: another rank, or this one before, has made other code of the same graph."""
        self.digests.setdefault(key, digest)
        own = "\n".join((str(self._rank), digest, self._tools, path))
        first = self._notes.compare_set(key, "", own).decode()
        rank, digest_there, tools_there, path_there = first.split("\n")
        if (digest_there, tools_there) == (digest, self._tools):
            return
        cause = f"ranks {rank} and {self._rank} have compiled different programs of {what}"
        if tools_there != self._tools:
            cause += f", with {tools_there} and {self._tools}"
        raise NotSameBitsError(
            cause,
            "the same torch, compiler, processors and TORCHINDUCTOR_ variables on all machines;"
            f" diff {path_there} {path} shows the difference, where both files are at hand; or"
            " leave --compile out",
            "train.compile",
        )


def with_own_errors(compiled: F) -> F:
    """The compiled function, whose UserErrors of the backend come as they are."""

    @wraps(compiled)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return compiled(*arguments, **options)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, UserError):
                raise error.inner_exception from None
            raise

    return call  # type: ignore[return-value]


def _shared_notes(comm: Comm, device: torch.device) -> Store:
    """A place for notes of the ranks, new for each engine."""
    if comm.group is None:
        return HashStore()
    number = torch.tensor(secrets.randbits(62))
    comm.broadcast([number], device)
    return PrefixStore(f"programs-{number.item()}", _get_default_store())


def _cpp_tools() -> str:
    """The C++ compiler, and what it is told beside the code."""
    version = get_compiler_version_info(get_cpp_compiler())
    named = re.search(r"(?:gcc|clang) version \S+", version)
    options = CppTorchOptions(vec_isa=pick_vec_isa())
    flags = " ".join([*options.get_cflags(), *options.get_definitions()])
    return f"torch {torch.__version__}, {named[0] if named else version}: {_digest(flags)[:8]}"


def _text_of(graph: GraphModule) -> str:
    """A graph with the shapes, strides and formats of its values."""
    text = graph.print_readable(print_output=False, include_stride=True, include_device=True)
    return _without_places(text)


def _place_of(graph: GraphModule) -> str:
    """Where the first operation of a graph is written: "forward, model.py:12". A library's code has
    no line: the operation, then.
    """
    operations = [node for node in graph.graph.nodes if node.op.startswith("call_")]
    for node in operations:
        line = _LINE.search(node.stack_trace or "")
        if line:
            return f"{line[3]}, {line[1]}:{line[2]}"
    return f"the model's {operations[0].name}" if operations else "the model"


def _without_places(text: str) -> str:
    """A text without comments, folders and numbers of devices."""
    return _DEVICE.sub("N", _FOLDER.sub('"', _COMMENT.sub("", text)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
