"""AMD GPUs by what the kernel's driver (KFD) lays out in sysfs: no ROCm library is loaded, no
context made. Indices are those a program sees under the variables of VISIBLE.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from samecurve.core.planning.machine import Device
from samecurve.errors import UserError

TOPOLOGY = Path("/sys/class/kfd/kfd/topology")
VISIBLE = "HIP_VISIBLE_DEVICES"
_RUNTIME = "ROCR_VISIBLE_DEVICES"  # applied first, by the layer below HIP
_FRAME_BUFFERS = {
    1,
    2,
}  # heap types of a memory bank: the card's own memory, visible to the host or not


def devices(environment: Mapping[str, str], topology: Path = TOPOLOGY) -> tuple[Device, ...]:
    """The GPUs that the variables leave visible, in their order. () without the driver.

    UserError: a variable names a GPU that isn't there.
    """
    found = _gpus(topology)
    found = _visible(_RUNTIME, environment.get(_RUNTIME), found)
    name = variable(environment)
    found = _visible(name, environment.get(name), found)
    return tuple(
        Device(kind="cuda", index=seen, name=name, memory=memory)
        for seen, (name, memory, _) in enumerate(found)
    )


def variable(environment: Mapping[str, str]) -> str:
    """The variable that HIP reads: CUDA's where only that is set."""
    return (
        "CUDA_VISIBLE_DEVICES"
        if not environment.get(VISIBLE) and "CUDA_VISIBLE_DEVICES" in environment
        else VISIBLE
    )


def _gpus(topology: Path) -> list[tuple[str, int, str]]:
    """Name, bytes of memory and unique id of each node that has compute units."""
    found = []
    nodes = [path for path in topology.glob("nodes/*") if path.name.isdigit()]
    for node in sorted(nodes, key=lambda path: int(path.name)):
        values = _properties(node / "properties")
        if values.get("simd_count", 0) > 0:
            banks = [_properties(bank) for bank in node.glob("mem_banks/*/properties")]
            memory = sum(
                bank.get("size_in_bytes", 0)
                for bank in banks
                if bank.get("heap_type") in _FRAME_BUFFERS
            )
            found.append((f"AMD {_name(values)}", memory, f"GPU-{values.get('unique_id', 0):016x}"))
    return found


def _name(values: Mapping[str, int]) -> str:
    """The card's own where its firmware tells it; else its architecture: 90402 is gfx942."""
    version = values.get("gfx_target_version", 0)
    architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    with suppress(OSError):
        told = (
            Path(f"/sys/class/drm/renderD{values.get('drm_render_minor', 0)}/device/product_name")
            .read_text()
            .strip()
        )
        return f"{told} ({architecture})" if told else architecture
    return architecture


def _properties(path: Path) -> dict[str, int]:
    """Lines of a name and a number. {} where a container hides the device: its file can't be read,
    or is empty.
    """
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def _visible(
    name: str, value: str | None, found: list[tuple[str, int, str]]
) -> list[tuple[str, int, str]]:
    if value is None:
        return found
    chosen = []
    for entry in filter(None, (part.strip() for part in value.split(","))):
        if entry == "-1":
            break
        matches = [
            gpu
            for index, gpu in enumerate(found)
            if entry == str(index) or entry.lower() == gpu[2].lower()
        ]
        if len(matches) != 1:
            raise UserError(
                f"{name}={value} names {entry}, and this machine has GPUs"
                f" {', '.join(map(str, range(len(found)))) or '(none)'}",
                f"correct it, or unset {name}",
                name,
            )
        chosen += matches
    return chosen
