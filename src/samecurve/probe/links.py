"""How the GPUs of this machine are connected, as their driver tells it."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

import pynvml

from samecurve import probe
from samecurve.probe import amd, nvidia

Links = dict[tuple[int, int], str]  # two indices of GPUs, in both orders -> the path between them

_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which is a tuple in pynvml: a comma too many
_PATHS = {  # by the nearest thing that two GPUs have in common
    pynvml.NVML_TOPOLOGY_INTERNAL: "one board",
    pynvml.NVML_TOPOLOGY_SINGLE: "PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "CPU",
    pynvml.NVML_TOPOLOGY_NODE: "CPU",
    pynvml.NVML_TOPOLOGY_SYSTEM: "NUMA",
}


def find_links() -> Links:
    """The paths between the visible GPUs; {} without a driver, or with one GPU.

    A path that the driver doesn't tell is left out. UserError: as nvidia.devices().
    """
    handles = nvidia.handles(os.environ)
    try:
        return _links_of(handles) if handles else amd.links(os.environ, probe.TOPOLOGY)
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def peer_access(environment: Mapping[str, str]) -> dict[tuple[int, int], bool]:
    """Whether NVIDIA's driver lets the first of two visible GPUs read the other's memory.

    A pair of which the driver tells nothing is left out. UserError: as nvidia.devices().
    """
    handles = nvidia.handles(environment)
    access: dict[tuple[int, int], bool] = {}
    try:
        for first, one in enumerate(handles):
            for second, other in enumerate(handles):
                if first != second:
                    with suppress(pynvml.NVMLError):
                        status = pynvml.nvmlDeviceGetP2PStatus(one, other, _READ)
                        access[first, second] = status == pynvml.NVML_P2P_STATUS_OK
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return access


def _links_of(handles: Sequence[Any]) -> Links:
    links: Links = {}
    for (first, one), (second, other) in combinations(enumerate(handles), 2):
        with suppress(pynvml.NVMLError):
            path = _nvlink(one, other) or _PATHS.get(
                pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other), ""
            )
            if path:
                links[first, second] = links[second, first] = path
    return links


def _nvlink(one: Any, other: Any) -> str:
    """'NVLink x 4': the links between two GPUs, or from one of them to the switch; '': none."""
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return ""
    if status != pynvml.NVML_P2P_STATUS_OK:
        return ""
    straight, active = 0, 0
    with suppress(pynvml.NVMLError):  # the first link that this GPU does not have
        address = pynvml.nvmlDeviceGetPciInfo(other).busId
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            if pynvml.nvmlDeviceGetNvLinkState(one, link) == pynvml.NVML_FEATURE_ENABLED:
                active += 1
                straight += pynvml.nvmlDeviceGetNvLinkRemotePciInfo(one, link).busId == address
    count = straight or active  # without a straight one they go to a switch
    return f"NVLink x {count}" if count else "NVLink"
