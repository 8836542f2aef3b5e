"""Python and the libraries: their versions, and whether they can use this machine's GPUs."""

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import samecurve
from samecurve.core.planning.machine import NVIDIA
from samecurve.probe import Gpus
from samecurve.probe.engines import unfit_engines
from samecurve.probe.gpu_state import cuda_of_driver
from samecurve.seam import Device, install_command, join_words
from samecurve_products.doctor import Check, failed, passed, warned

_NEWEST_TRIED = (3, 13)
TorchFacts = Mapping[str, Any]  # as worker/jobs/check_job.py tells them
JaxFacts = Mapping[str, Any]


def check_python(version: Sequence[int] = sys.version_info[:2]) -> Check:
    """The version of Python. pyproject.toml has the oldest."""
    shown = f"{platform.python_version()}, samecurve {samecurve.__version__}"
    if tuple(version) > _NEWEST_TRIED:
        newest = ".".join(map(str, _NEWEST_TRIED))
        return warned(
            "Python",
            f"{shown}: newer than what was tried",
            f"nothing needs to be done; if a library fails, use Python {newest}, which was tried",
        )
    return passed("Python", shown)


def check_torch(facts: TorchFacts, gpus: Gpus) -> list[Check]:
    """torch, its build beside the driver, and NCCL. facts: of a process that has imported torch."""
    if "error" in facts and "version" not in facts:
        return [
            failed(
                "torch",
                f"torch can't be imported: {facts['error']}",
                "python -c 'import torch' shows the whole error; installing torch again repairs a"
                " half installed one",
            )
        ]
    build = _build(facts)
    unfit = unfit_engines(gpus.vendor).get("torch")
    if unfit:
        return [failed("torch", f"this machine has GPUs, and {unfit.cause}", unfit.remedy)]
    if not gpus.devices:
        return [passed("torch", build)]
    if not facts["available"]:
        return [failed("torch", *_unusable(facts, build, gpus))]
    return [_seen(facts, build, gpus.devices), *_kernels(facts, gpus), *_nccl(facts)]


def _build(facts: TorchFacts) -> str:
    if facts["cuda"]:
        return f"{facts['version']}, built for CUDA {facts['cuda']}"
    if facts["hip"]:
        return f"{facts['version']}, built for ROCm {facts['hip']}"
    return f"{facts['version']}, a CPU build"


def _unusable(facts: TorchFacts, build: str, gpus: Gpus) -> tuple[str, str]:
    """Why torch finds no GPU where the driver shows some: the figure and the remedy."""
    driver = cuda_of_driver() if gpus.vendor == NVIDIA else ""
    wanted = facts["cuda"] or ""
    newest, needed = driver.partition(".")[0], wanted.partition(".")[0]
    if driver and wanted and int(newest) < int(needed):
        return (
            f"{build}; the driver {gpus.devices[0].driver} runs CUDA {driver} at most",
            f"install a newer driver, or the torch that is built for CUDA {newest} (PyTorch's page"
            ' "Start Locally" prints the command)',
        )
    why = facts.get("error") or "it gives no reason"
    return (
        f"{build}; it finds no GPU, and the driver shows {len(gpus.devices)}: {why}",
        "python -c 'import torch; torch.cuda.init()' shows the whole error; a driver that was"
        " updated since the last start needs a restart",
    )


def _seen(facts: TorchFacts, build: str, devices: Sequence[Device]) -> Check:
    names = facts["names"]
    if len(names) == len(devices):
        return passed("torch", f"{build}; it sees {len(names)} of {len(devices)} GPUs")
    return failed(
        "torch",
        f"{build}; it sees {len(names)} of {len(devices)} GPUs",
        "the GPU that is missing can't be used: look at `dmesg | grep -i -e xid -e amdgpu`;"
        f" --gpus {','.join(map(str, range(len(names))))} goes without it",
    )


def _kernels(facts: TorchFacts, gpus: Gpus) -> list[Check]:
    """GPUs for which torch has no kernels: too old or too new for this build."""
    if gpus.vendor != NVIDIA or not facts["arches"]:
        return []
    lacking = [
        f"GPU {device.index} ({device.name}, sm_{device.capability.replace('.', '')})"
        for device in gpus.devices
        if device.capability and not any(_serves(name, device) for name in facts["arches"])
    ]
    if not lacking:
        return []
    return [
        failed(
            "torch kernels",
            f"this torch has no kernels for {join_words(lacking)}; it has"
            f" {', '.join(facts['arches'])}",
            "install a torch that is built for this GPU: a newer one for a new card, an older one"
            " for an old card",
        )
    ]


def _serves(name: str, device: Device) -> bool:
    """Whether kernels of this name run on the device.

    name: sm_80 runs on GPUs of the same major number, compute_80 is compiled for any later GPU
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
    if not match:
        return False
    built, own = (int(match[2]), int(match[3])), tuple(map(int, device.capability.split(".")))
    return built <= own and (match[1] == "compute" or built[0] == own[0])


def _nccl(facts: TorchFacts) -> list[Check]:
    word = "RCCL" if facts["hip"] else "NCCL"
    if facts["nccl"]:
        return [passed(word, f"{facts['nccl']} (torch.cuda.nccl.version())")]
    return [
        failed(
            word,
            f"this torch is built without {word}, which adds up gradients between GPUs",
            'install the torch that PyTorch\'s page "Start Locally" names for this GPU; until then'
            " --sync-backend cpu goes through host memory, slowly",
        )
    ]


def check_jax(facts: JaxFacts | None, gpus: Gpus) -> list[Check]:
    """jax and its devices. facts: None: it is not installed, which is no fault."""
    if facts is None:
        return [
            passed("jax", f"not installed; only --engine jax needs it: {install_command('jax')}")
        ]
    if "devices" not in facts:
        return [
            warned(
                "jax",
                f"it can't list its devices: {facts['error']}",
                "python -c 'import jax; print(jax.devices())' shows the whole error; --engine torch"
                " needs no jax",
            )
        ]
    versions = f"jax {facts['version']}{_jaxlib(facts['version'])}"
    figure = f"{versions}; jax.devices() is {facts['devices']}"
    unfit = unfit_engines(gpus.vendor).get("jax")
    if unfit:
        return [warned("jax", f"{figure}; {unfit.cause}", f"{unfit.remedy}; or --engine torch")]
    if gpus.devices and not facts["gpus"]:
        return [
            warned(
                "jax",
                f"{figure}: it uses no GPU",
                "unset JAX_PLATFORMS if it is set; JAX_PLATFORMS=cuda python -c 'import jax;"
                " jax.devices()' says why; or --engine torch",
            )
        ]
    return [passed("jax", figure)]


def _jaxlib(version: str) -> str:
    """The version of jaxlib where it differs from jax's."""
    try:
        other = metadata.version("jaxlib")
    except metadata.PackageNotFoundError:
        return ""
    return "" if other == version else f", jaxlib {other}"
