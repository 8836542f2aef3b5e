"""How GPUs are connected, as a stand-in for the driver tells it."""

from types import SimpleNamespace

import pynvml
import pytest

from samecurve.probe.links import find_links

SWITCHED, STRAIGHT = 18, 4


def drive(monkeypatch: pytest.MonkeyPatch, *, straight: bool) -> None:
    """Three GPUs: links between 0 and 1, to a switch or straight; 2 sits on the other processor."""

    def p2p(one: int, other: int, _what: int) -> int:
        return 0 if {one, other} == {0, 1} else 5

    def link_state(_handle: int, link: int) -> int:
        if link >= SWITCHED:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 1

    def remote(handle: int, link: int) -> SimpleNamespace:
        is_other = straight and link < STRAIGHT
        return SimpleNamespace(busId=f"bus-{1 - handle}" if is_other else "switch")

    monkeypatch.setattr("samecurve.probe.nvidia.handles", lambda _environment: [0, 1, 2])
    stand_ins = {
        "nvmlDeviceGetP2PStatus": p2p,
        "nvmlDeviceGetNvLinkState": link_state,
        "nvmlDeviceGetNvLinkRemotePciInfo": remote,
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"bus-{handle}"),
        "nvmlDeviceGetTopologyCommonAncestor": lambda *_: pynvml.NVML_TOPOLOGY_SYSTEM,
        "nvmlShutdown": lambda: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(pynvml, name, stand_in)


@pytest.mark.parametrize(("straight", "count"), [(True, STRAIGHT), (False, SWITCHED)])
def test_links(monkeypatch: pytest.MonkeyPatch, *, straight: bool, count: int) -> None:
    drive(monkeypatch, straight=straight)
    links = find_links()
    assert links[0, 1] == links[1, 0] == f"NVLink x {count}"
    assert links[0, 2] == links[2, 1] == "NUMA"


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samecurve.probe.nvidia.handles", lambda _environment: [])
    assert find_links() == {}
