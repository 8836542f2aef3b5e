"""Fills the Python side of torch.cuda from the native part, so that torch's own code runs on it.

A CPU build of torch has torch.cuda's Python files, but not the functions of torch._C that they
call. Where torch's own Python code can run on such a function, only the function is given here.
"""

import atexit
import faulthandler
import functools
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import emulated_cuda_native as native
import torch

from samecurve_products.rehearse.emulated_cuda import report, torch_streams
from samecurve_products.rehearse.emulated_cuda.device_faults import watch_for_faults
from samecurve_products.rehearse.emulated_cuda.gpus import AMD, CUDA, HIP, NVIDIA, uuid_of
from samecurve_products.rehearse.emulated_cuda.machine import GPUS, Emulation, Gpu, from_environment
from samecurve_products.rehearse.emulated_cuda.visible import visible_gpus

if TYPE_CHECKING:
    from collections.abc import Callable

NVIDIA_ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
AMD_ARCHITECTURES = ["gfx90a", "gfx942", "gfx1100"]


def install() -> None:
    """Give torch its devices. torch is imported, and the native part is in memory already."""
    native.install()
    emulation = from_environment()
    gpu = GPUS[emulation.gpu]
    name_versions(gpu)
    fill_devices(emulation, gpu)
    torch_streams.install()
    fill_memory()
    refuse_graphs()
    keep_watching_host_reads()
    install_collectives()
    watch_for_faults()
    write_report_at_exit(emulation)


def name_versions(gpu: Gpu) -> None:
    """torch.version says CUDA or HIP, never both."""
    if gpu.gcn_arch:
        torch.version.hip = HIP
        torch.version.rocm = HIP.rpartition(".")[0]
    else:
        torch.version.cuda = CUDA


def fill_devices(emulation: Emulation, gpu: Gpu) -> None:
    """How many devices there are, which one is current, and what each says of itself."""
    cuda: Any = torch.cuda
    core: Any = torch._C
    architectures = AMD_ARCHITECTURES if gpu.gcn_arch else NVIDIA_ARCHITECTURES
    native.show_devices(len(visible_gpus(os.environ)))  # until the driver is asked
    core._cuda_getDeviceCount = lambda: len(torch_streams.seen_gpus())
    core._cuda_init = lambda: None
    core._cuda_isInBadFork = lambda: False
    core._cuda_getArchFlags = lambda: " ".join(architectures)
    core._cuda_getDevice = native.get_device
    core._cuda_setDevice = native.set_device
    core._cuda_exchangeDevice = core._cuda_maybeExchangeDevice = native.exchange_device
    core._cuda_canDeviceAccessPeer = lambda device, peer: device != peer
    core._cuda_synchronize = lambda: torch.accelerator.synchronize(native.get_device())
    core._cuda_ipc_collect = lambda: None
    core._cuda_getCompiledVersion = lambda: int(float(CUDA) * 1000)
    core._cuda_set_sync_debug_mode = native.set_sync_debug_mode
    core._cuda_get_sync_debug_mode = native.get_sync_debug_mode
    cuda._exchange_device = cuda._maybe_exchange_device = native.exchange_device
    cuda._is_compiled = lambda: True
    cuda._is_in_bad_fork = lambda: False
    cuda._lazy_init = cuda.init = torch_streams.initialize
    cuda.is_available = lambda: bool(torch_streams.seen_gpus())
    cuda.device_count = cuda._device_count_nvml = cuda._device_count_amdsmi = lambda: len(
        torch_streams.seen_gpus() if cuda._initialized else visible_gpus(os.environ)
    )
    cuda.is_bf16_supported = lambda including_emulation=True: (  # noqa: ARG005
        gpu.capability >= (8, 0)
    )
    cuda.get_arch_list = lambda: list(architectures)
    torch.backends.cuda.is_built = lambda: True
    cudnn: Any = torch.backends.cudnn
    cudnn.is_acceptable = lambda _tensor: False  # torch's own function warns of a build without it
    properties = [device_properties(gpu, emulation, index) for index in range(emulation.devices)]
    cuda.get_device_properties = lambda device=None: properties[
        torch_streams.seen_gpus()[torch_streams.index_of(device)]
    ]
    cuda.get_device_name = lambda device=None: cuda.get_device_properties(device).name
    cuda.get_device_capability = lambda device=None: (
        cuda.get_device_properties(device).major,
        cuda.get_device_properties(device).minor,
    )


def device_properties(gpu: Gpu, emulation: Emulation, index: int) -> SimpleNamespace:
    """The fields of torch's _CudaDeviceProperties."""
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=emulation.memory or gpu.memory,
        multi_processor_count=gpu.processors,
        warp_size=gpu.warp,
        max_threads_per_multi_processor=gpu.threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=gpu.shared,
        shared_memory_per_block_optin=gpu.shared,
        shared_memory_per_multiprocessor=gpu.shared,
        L2_cache_size=gpu.l2_bytes,
        gcnArchName=gpu.gcn_arch or gpu.name,
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid=uuid_of(index, AMD if gpu.gcn_arch else NVIDIA),
        pci_bus_id=index + 1,
        pci_device_id=0,
        pci_domain_id=0,
        clock_rate=1_980_000,
        memory_clock_rate=2_619_000,
        memory_bus_width=5120,
    )


def fill_memory() -> None:
    """What torch.cuda.memory's own functions call, and storages that change their size."""
    cuda: Any = torch.cuda
    core: Any = torch._C
    fractions: dict[int, float] = {}

    def set_fraction(fraction: float, device: int) -> None:
        fractions[device] = fraction
        native.set_memory_fraction(device, fraction)

    core._cuda_memoryStats = native.memory_stats
    core._cuda_resetPeakMemoryStats = native.reset_peak
    core._cuda_resetAccumulatedMemoryStats = native.reset_accumulated
    core._cuda_emptyCache = native.empty_cache
    core._cuda_setMemoryFraction = set_fraction
    core._cuda_getMemoryFraction = lambda device: fractions.get(device, 1.0)
    core._cuda_getAllocatorBackend = lambda: "native"
    core._cuda_memorySnapshot = lambda *_: {"segments": [], "device_traces": []}

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        index = torch_streams.index_of(device)
        total = native.memory(index)[2]
        return total - native.memory_reserved(index), total

    cuda.mem_get_info = cuda.memory.mem_get_info = mem_get_info
    storages: Any = torch.UntypedStorage
    resize_elsewhere = storages.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize_elsewhere(self, size)
        holder = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        native.resize_storage(holder, int(size))
        return self

    storages.resize_ = resize_
    make_elsewhere = storages.__new__

    def make(cls: Any, *sizes: Any, device: Any = None, **other: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make_elsewhere(cls, *sizes, device=device, **other)
        return torch.empty(*sizes, dtype=torch.uint8, device=device).untyped_storage()

    storages.__new__ = make


def refuse_graphs() -> None:
    """CUDA graphs replay kernels without Python, which CPU kernels cannot."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the emulated devices have no CUDA graphs: switch them off for this run")

    class CUDAGraph:
        """torch.cuda.CUDAGraph, refused by name."""

        __init__ = refuse

    cuda: Any = torch.cuda
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = CUDAGraph
    for name in ("graph", "make_graphed_callables", "graph_pool_handle"):
        setattr(cuda, name, refuse)
        setattr(cuda.graphs, name, refuse)
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = lambda: False
    core: Any = torch._C
    core._cuda_isCurrentStreamCapturing = lambda: False


def keep_watching_host_reads() -> None:
    """faulthandler takes SIGSEGV for itself: the emulator's handler goes before it again."""
    enable: Callable[..., None] = faulthandler.enable

    @functools.wraps(enable)
    def enable_and_watch(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        native.watch_host_reads()

    faulthandler.enable = enable_and_watch


def install_collectives() -> None:
    """The nccl process group, where this torch has torch.distributed."""
    if not torch.distributed.is_available():
        print(
            "emulated CUDA: this torch has no torch.distributed, so there is no nccl group",
            file=sys.stderr,
        )
        return
    from samecurve_products.rehearse.emulated_cuda import nccl

    nccl.install()


def write_report_at_exit(emulation: Emulation) -> None:
    """The counts of this process, at its end, os._exit included; its findings are in the file.

    A process that was forked from one without work on a device, as ranks are from a fork server,
    writes its own. One that was forked later, such as a loader's worker, has nothing to say.
    """
    folder = emulation.report
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    state = {"worked_before_fork": False, "is_silent": False}

    def look_before_fork() -> None:
        state["worked_before_fork"] = native.counts()["ops"] > 0

    def begin_child() -> None:
        state["is_silent"] = state["worked_before_fork"]

    def write() -> None:
        if not state["is_silent"]:
            state["is_silent"] = True
            report.append(folder, {"row": "end", "command": sys.argv, "counts": native.counts()})

    exit_at_once: Any = os._exit

    def write_and_exit(status: int) -> None:
        write()
        exit_at_once(status)

    os.register_at_fork(before=look_before_fork, after_in_child=begin_child)
    atexit.register(write)
    os._exit = write_and_exit
