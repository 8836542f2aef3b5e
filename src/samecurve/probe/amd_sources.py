"""The three sources that know the AMD GPUs of a machine. Each gives [] where it knows none."""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samecurve.processes import output_of

_LIBRARY, _COMMAND = "amdsmi", "rocm-smi"
_ARGUMENTS = ("--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--showbus")
_PATIENCE = 20.0  # seconds for the command, which asks the driver for each GPU
_MIB = 1 << 20
# heap types of the kernel's memory banks: the card's own memory, visible to the host or not
_FRAME_BUFFERS = {1, 2}
_LINK_TYPES = {2: "PCIe", 11: "XGMI"}  # of the kernel's links between nodes


@dataclass(frozen=True, kw_only=True)
class AmdGpu:
    """A GPU as a source tells it. None or '': the source does not tell."""

    name: str  # with its architecture: Instinct MI300X (gfx942)
    memory: int  # bytes
    unique_id: str = ""  # as ROCR_VISIBLE_DEVICES takes it: GPU-00000000000000b1
    order: int = 0  # HIP counts GPUs in this order
    used: int | None = None  # bytes of its memory
    driver: str = ""
    uncorrected_errors: int | None = None
    processes: tuple[tuple[int, int | None], ...] = ()  # process id, bytes
    bus: str = ""


def from_library() -> list[AmdGpu]:
    """The GPUs that amdsmi tells. [] where it is not installed, or can't load its library."""
    if find_spec(_LIBRARY) is None:
        return []
    try:
        library = import_module(_LIBRARY)
        library.amdsmi_init()
    except Exception:  # KeyError, OSError and others: the import itself loads the library
        return []
    try:
        handles = library.amdsmi_get_processor_handles()
        return [_library_gpu(library, handle, place) for place, handle in enumerate(handles)]
    except Exception:
        return []
    finally:
        with suppress(Exception):
            library.amdsmi_shut_down()


def _library_gpu(library: Any, handle: Any, place: int) -> AmdGpu:
    def told(function: str, default: Any) -> Any:
        """The answer of one of its functions; older versions lack some, containers hide some."""
        return _answer(lambda: getattr(library, function)(handle), default)

    chip = library.amdsmi_get_gpu_asic_info(handle)
    memory = library.amdsmi_get_gpu_vram_usage(handle)
    numbers = told("amdsmi_get_gpu_enumeration_info", {})
    hip = _number(numbers.get("hip_id"))
    errors = told("amdsmi_get_gpu_total_ecc_count", {})
    uses = _answer(lambda: _uses(library.amdsmi_get_gpu_process_list(handle)), ())
    return AmdGpu(
        name=_with_architecture(
            str(chip.get("market_name", "")), str(chip.get("target_graphics_version", ""))
        ),
        memory=int(memory["vram_total"]) * _MIB,
        unique_id=_unique_id(chip.get("asic_serial")),
        order=place if hip is None else hip,
        used=int(memory["vram_used"]) * _MIB,
        driver=str(told("amdsmi_get_gpu_driver_info", {}).get("driver_version", "")),
        uncorrected_errors=_number(errors.get("uncorrectable_count")),
        processes=uses,
        bus=str(told("amdsmi_get_gpu_device_bdf", "")),
    )


def _uses(processes: Any) -> tuple[tuple[int, int | None], ...]:
    return tuple((int(process["pid"]), _number(process.get("mem"))) for process in processes)


def from_command(environment: Mapping[str, str]) -> list[AmdGpu]:
    """The GPUs that rocm-smi prints. [] where there is no such command on PATH, or it fails."""
    command = shutil.which(_COMMAND, path=environment.get("PATH", ""))
    if command is None:
        return []
    try:
        done = output_of([command, *_ARGUMENTS, "--json"], seconds=_PATIENCE)
    except OSError:
        return []
    return read_command(done.stdout)


def read_command(printed: str) -> list[AmdGpu]:
    """The GPUs in what rocm-smi prints: warnings, and then an object with a key for each card."""
    try:
        cards = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
        return [
            _command_gpu(int(name.removeprefix("card")), card)
            for name, card in cards.items()
            if name.startswith("card") and "VRAM Total Memory (B)" in card
        ]
    except (ValueError, AttributeError, TypeError):
        return []


def _command_gpu(number: int, card: Mapping[str, str]) -> AmdGpu:
    name = card.get("Card Series") or card.get("Card series") or card.get("Device Name") or ""
    return AmdGpu(
        name=_with_architecture(name, card.get("GFX Version", "")),
        memory=int(card["VRAM Total Memory (B)"]),
        unique_id=_unique_id(card.get("Unique ID")),
        order=int(card.get("Node ID", number)),
        used=_number(card.get("VRAM Total Used Memory (B)")),
        bus=card.get("PCI Bus", "").lower(),
    )


def from_kernel(topology: Path) -> list[AmdGpu]:
    """The nodes with compute units that the kernel's driver (KFD) lays out in sysfs."""
    gpus = []
    nodes = [path for path in topology.glob("nodes/*") if path.name.isdigit()]
    for node in nodes:
        values = _read_properties(node / "properties")
        if values.get("simd_count", 0) > 0:
            banks = [_read_properties(bank) for bank in node.glob("mem_banks/*/properties")]
            memory = sum(
                bank.get("size_in_bytes", 0)
                for bank in banks
                if bank.get("heap_type") in _FRAME_BUFFERS
            )
            card = Path(f"/sys/class/drm/renderD{values.get('drm_render_minor', 0)}/device")
            gpus.append(
                AmdGpu(
                    name=_card_name(values, card),
                    memory=memory,
                    unique_id=f"GPU-{values.get('unique_id', 0):016x}",
                    order=int(node.name),
                    used=_used(card),
                    bus=card.resolve().name if card.exists() else "",
                )
            )
    return gpus


def read_links(topology: Path) -> dict[tuple[int, int], str]:
    """The links between the kernel's nodes: (from, to) -> XGMI or PCIe."""
    links: dict[tuple[int, int], str] = {}
    for kind in ("p2p_links", "io_links"):  # a direct link wins over a way through the host
        for file in topology.glob(f"nodes/*/{kind}/*/properties"):
            values = _read_properties(file)
            word = _LINK_TYPES.get(values.get("type", 0))
            if word and "node_from" in values and "node_to" in values:
                links[values["node_from"], values["node_to"]] = word
    return links


def _used(card: Path) -> int | None:
    """Bytes of the card's memory that are taken."""
    try:
        return int((card / "mem_info_vram_used").read_text())
    except (OSError, ValueError):
        return None


def _card_name(values: Mapping[str, int], card: Path) -> str:
    """The card's name where its firmware has one, else its architecture: 90402 is gfx942."""
    version = values.get("gfx_target_version", 0)
    architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    try:
        name = (card / "product_name").read_text().strip()
    except OSError:
        name = ""
    return _with_architecture(name, architecture)


def _with_architecture(name: str, architecture: str) -> str:
    if not name or not architecture:
        return name or architecture or "GPU"
    return f"{name} ({architecture})"


def _unique_id(serial: object) -> str:
    """'0x9246A1B2C3D4E5F6' -> 'GPU-9246a1b2c3d4e5f6'; 'N/A' -> ''."""
    number: int | None = _answer(lambda: int(str(serial), 16), None)
    return "" if number is None else f"GPU-{number:016x}"


def _number(value: object) -> int | None:
    """The number that a source gives; None: it says N/A, or nothing."""
    try:
        return int(str(value))
    except ValueError:
        return None


def _answer(ask: Callable[[], Any], default: Any) -> Any:
    """The answer of a question that may fail in any way; the default then."""
    try:
        return ask()
    except Exception:
        return default


def _read_properties(path: Path) -> dict[str, int]:
    """The names and numbers in the lines of a file.

    {} where a container hides the device: its file can't be read, or is empty.
    """
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
