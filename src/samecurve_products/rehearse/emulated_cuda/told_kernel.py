"""What AMD's kernel driver says of emulated GPUs: files of its topology, and each card's load.

samecurve reads both below /sys, where nobody can add files. So its modules that do are given
another place, and another reader, as soon as they are imported. NVIDIA's driver has no such files.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from samecurve_products.rehearse.emulated_cuda import build, gpus

Look = Callable[[ModuleType], None]
_XGMI, _OWN_MEMORY = 11, 1  # types of a link and of a memory bank, as the kernel numbers them
_WATTS = 140.0


def looks(environment: Mapping[str, str]) -> dict[str, Look]:
    """What to change in modules of samecurve, by their names; nothing without GPUs of AMD."""
    machine = gpus.emulated_machine(environment, gpus.AMD)
    if not machine.gpus:
        return {}
    loads = gpus.Utilisation()
    numbers = {gpus.bus_address(index): index for index in range(len(machine.gpus))}

    def give_topology(module: ModuleType) -> None:
        module.TOPOLOGY = _topology(machine)  # type: ignore[attr-defined]

    def give_reader(module: ModuleType) -> None:
        def read_card(card: Path) -> tuple[float, float, float, float]:
            index = numbers[card.name]
            celsius = machine.faults(index).celsius
            load = loads.read(machine, index), machine.used(index), _WATTS, celsius
            values: tuple[float, float, float, float] = module.CardLoad(*load)
            return values

        module.read_card = read_card  # type: ignore[attr-defined]

    return {"samecurve.probe": give_topology, "samecurve.probe.amd_load": give_reader}


def _topology(machine: gpus.Machine) -> Path:
    """The directory that the kernel's driver lays out, in the cache."""
    files = _files(machine)
    key = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:12]
    place = build.cache_home() / f"kernel-{key}"
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=place.parent))
    for name, values in files.items():
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{key} {value}\n" for key, value in values.items())
        (fresh / name).write_text(text)
    try:
        os.rename(fresh, place)
    except OSError:  # another process was faster
        shutil.rmtree(fresh)
    return place


def _files(machine: gpus.Machine) -> dict[str, dict[str, int]]:
    """The values in each file: node 0 is the processor, and each GPU has links to all others."""
    files = {"nodes/0/properties": {"simd_count": 0}}
    nodes = range(1, len(machine.gpus) + 1)
    for node, gpu in zip(nodes, machine.gpus, strict=True):
        major, minor, step = [*gpu.gcn_arch.partition(":")[0].removeprefix("gfx")]
        files[f"nodes/{node}/properties"] = {
            "simd_count": 4 * gpu.processors,
            "gfx_target_version": 10_000 * int(major) + 100 * int(minor, 16) + int(step, 16),
            "unique_id": gpus.unique_id(node - 1),
        }
        bank = {"heap_type": _OWN_MEMORY, "size_in_bytes": gpu.memory}
        files[f"nodes/{node}/mem_banks/0/properties"] = bank
        for other in set(nodes) - {node}:
            link = {"type": _XGMI, "node_from": node, "node_to": other}
            files[f"nodes/{node}/p2p_links/{other}/properties"] = link
    return files
