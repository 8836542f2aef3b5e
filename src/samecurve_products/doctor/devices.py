"""The GPUs: which there are, who hides some, and what their driver says of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.core.planning.machine import NVIDIA
from samecurve.probe import Gpus, find_gpus
from samecurve.probe.gpu_state import GpuState, driver_fault, gpu_states, visibility_variables
from samecurve.seam import Device, UserError, counted, join_words, show_bytes, some
from samecurve_products.doctor import Check, failed, passed, warned

_MOST_SHOWN = 4  # processes of a GPU
_CROWDED = 0.1  # share of a GPU's memory that others may hold before it is worth a warning
_CARDS = {"0x10de": "NVIDIA", "0x1002": "AMD"}  # vendors in sysfs
# PCI classes: NVIDIA's cards show as displays (03) too, of AMD's only those that compute (12)
_COMPUTE_CLASSES = {"NVIDIA": ("0x0300", "0x0302"), "AMD": ("0x0380", "0x1200")}
_NO_GPU = "samecurve train --devices cpu:2 trains on two CPU ranks"


@dataclass(frozen=True)
class GpuReading:
    """The GPUs that this process may use, and the state of each.

    error: why a variable's GPUs could not be found
    """

    gpus: Gpus
    states: Sequence[GpuState]
    error: UserError | None = None


def read_gpus(environment: Mapping[str, str]) -> GpuReading:
    """Ask the drivers."""
    try:
        gpus = find_gpus(environment)
        return GpuReading(gpus, gpu_states(gpus.vendor, environment))
    except UserError as error:
        return GpuReading(Gpus("", (), ""), (), error)


def check_devices(
    reading: GpuReading, environment: Mapping[str, str], root: Path = Path("/")
) -> list[Check]:
    """root: below which the system's files lie."""
    if reading.error:
        return [failed("GPUs", reading.error.cause, reading.error.remedy)]
    gpus = reading.gpus
    if not gpus.devices:
        return [*_hidden(environment, 0), _without_gpus(environment, root)]
    names = list(dict.fromkeys(gpu.name for gpu in gpus.devices))
    figure = f"Detected {counted(len(gpus.devices), 'GPU')}: {', '.join(names)}"
    checks = [passed("GPUs", figure), *_hidden(environment, len(gpus.devices))]
    if len(names) > 1:
        checks.append(
            warned(
                "GPU models",
                f"{len(names)} kinds of GPU: every step waits for the slowest of them",
                "--balance measured gives each GPU work by its measured speed; or --gpus with the"
                " indices of one kind",
            )
        )
    for device, state in zip(gpus.devices, reading.states, strict=True):
        checks += [_listed(device, state), *_state_checks(device, state, gpus)]
    return checks


def _hidden(environment: Mapping[str, str], left: int) -> list[Check]:
    """The variables that hide GPUs, and how many they leave."""
    names = [name for name in visibility_variables() if name in environment]
    if not names:
        return []
    every = {name: value for name, value in environment.items() if name not in names}
    values = ", ".join(f"{name}={environment[name] or '(empty)'}" for name in names)
    try:
        there = len(find_gpus(every).devices)
    except UserError as error:  # a GPU that is hidden has a fault
        figure = f"{values} leaves {left}; of the others: {error.cause}"
        return [warned("visible GPUs", figure, error.remedy)]
    figure = f"{values} leaves {left} of {counted(there, 'GPU')}"
    if there and not left:
        return [
            failed(
                "visible GPUs", figure, f"unset {' '.join(names)}, or name the GPUs to use in it"
            )
        ]
    return [passed("visible GPUs", figure)]


def _without_gpus(environment: Mapping[str, str], root: Path) -> Check:
    """Why there is no GPU: a driver that can't be asked, a card without a driver, or no card."""
    if fault := driver_fault():
        return failed(
            "GPUs",
            f"NVIDIA's driver is there and can't be asked: {fault}",
            "restart the machine, which loads the driver that was installed last; in a container"
            " that of the host counts. `nvidia-smi` then has to list the GPUs",
        )
    cards = _cards(root)
    if cards and not any(name in environment for name in visibility_variables()):
        vendors = " and ".join(f"{counted(count, 'card')} of {name}" for name, count in cards)
        return failed(
            "GPUs",
            f"this machine has {vendors}, and no driver answers",
            "install the vendor's driver, and restart; in a container start it with the GPUs"
            " (docker run --gpus all; AMD: --device /dev/kfd --device /dev/dri)",
        )
    return warned(
        "GPUs",
        "Detected 0 GPUs: no driver of NVIDIA or AMD answers",
        f"{_NO_GPU}. If there should be a GPU, `nvidia-smi` or `rocm-smi` says whether the driver"
        " sees it",
    )


def _cards(root: Path) -> list[tuple[str, int]]:
    """How many cards of each vendor sit in the machine, whatever the drivers say."""
    counts: dict[str, int] = {}
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        try:
            vendor = _CARDS.get((device / "vendor").read_text().strip(), "")
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor and kind.startswith(_COMPUTE_CLASSES[vendor]):
            counts[vendor] = counts.get(vendor, 0) + 1
    return sorted(counts.items())


def _listed(device: Device, state: GpuState) -> Check:
    """A GPU as `nvidia-smi -L` lists it, and its memory."""
    words = [f"{device.name} (UUID: {state.uuid})" if state.uuid else device.name]
    words.append(show_bytes(device.memory))
    if state.free is not None:
        words.append(f"{show_bytes(state.free)} free")
    if device.driver:
        words.append(f"driver {device.driver}")
    if device.capability:
        words.append(f"compute capability {device.capability}")
    if state.uncorrected_errors == 0:
        words.append("no memory errors")
    return passed(f"GPU {device.index}", ", ".join(words))


def _state_checks(device: Device, state: GpuState, gpus: Gpus) -> list[Check]:
    """The faults of one GPU."""
    others = ",".join(str(gpu.index) for gpu in gpus.devices if gpu is not device)
    avoid = f"--gpus {others} goes without it" if others else _NO_GPU
    checks = [
        _processes(device, state, avoid),
        _mode(device, state, avoid),
        _errors(device, state, avoid, gpus.vendor),
    ]
    if state.slowdowns:
        checks.append(
            warned(
                f"GPU {device.index} clock",
                f"its clock is held down: {join_words(state.slowdowns)}",
                "look at fans, air flow and power cables; `nvidia-smi -q -d PERFORMANCE` says more."
                f" All GPUs wait for the slowest; {avoid}",
            )
        )
    if state.lanes and state.lanes[0] < state.lanes[1]:
        now, most = state.lanes
        checks.append(
            warned(
                f"GPU {device.index} slot",
                f"it uses {now} of its {most} PCIe lanes, so copies from and to it are slower",
                "put the card into a slot with all lanes, and look at its riser cable",
            )
        )
    return [check for check in checks if check]


def _processes(device: Device, state: GpuState, avoid: str) -> Check | None:
    """Programs that are on the GPU already."""
    held = 0 if state.free is None else device.memory - state.free
    if not state.processes and held < _CROWDED * device.memory:
        return None
    shown = [
        f"{process.name} (process {process.pid}"
        + (f", {show_bytes(process.memory)})" if process.memory else ")")
        for process in state.processes
    ]
    by = f" by {some(shown, _MOST_SHOWN)}" if shown else " by a program that is not seen from here"
    return warned(
        f"GPU {device.index} in use",
        f"{show_bytes(held)} of {show_bytes(device.memory)} are taken{by}",
        f"wait for that program, or end it if it is yours; {avoid}",
    )


def _mode(device: Device, state: GpuState, avoid: str) -> Check | None:
    """NVIDIA's compute mode: how many processes may use the GPU."""
    name, change = f"GPU {device.index} mode", f"sudo nvidia-smi -i {device.index} -c DEFAULT"
    if state.compute_mode == "prohibited":
        return failed(name, "no process may compute on it (prohibited)", f"{change}; {avoid}")
    if state.compute_mode == "exclusive" and state.processes:
        figure = "one process at a time may use it (exclusive), and one does"
        return failed(name, figure, f"wait for that process; or {change}; {avoid}")
    if state.compute_mode == "exclusive":
        return warned(
            name,
            "one process at a time may use it (exclusive): a run works, two runs at once don't",
            change,
        )
    return None


def _errors(device: Device, state: GpuState, avoid: str, vendor: str) -> Check | None:
    if not state.uncorrected_errors:
        return None
    reset = f"sudo nvidia-smi --gpu-reset -i {device.index}" if vendor == NVIDIA else "a restart"
    return failed(
        f"GPU {device.index} memory",
        f"{counted(state.uncorrected_errors, 'error')} in its memory could not be corrected:"
        " results may be wrong",
        f"{reset} clears them, while nothing runs on it; if they come back, have the card"
        f" replaced. Until then {avoid}",
    )
