"""When a device is called idle, and the console's one line for all of them."""

from collections.abc import Sequence

from samecurve.core.events import Event
from samecurve.launch.monitors import IdleDevices
from samecurve.observe.event_lines import load_line


def reported(*readings: tuple[float, Sequence[float | None]]) -> list[tuple[float, list[int]]]:
    idle = IdleDevices(60)
    return [(at, new) for at, values in readings if (new := idle.add(at, values))]


def test_an_idle_device_is_reported_after_a_minute_and_once() -> None:
    """Again only after it has worked; not while nobody works, nor while it is not known what it
    does.
    """
    busy, one = [0.9, 0.9], [0.9, 0.0]
    assert reported((0, one), (30, one), (59, one)) == []
    assert reported(*((at, one) for at in range(0, 300, 5))) == [(60, [1])]
    assert reported((0, one), (60, one), (65, busy), (70, one), (125, one), (130, one)) == [
        (60, [1]),
        (130, [1]),
    ]
    assert reported((0, [0.0, 0.0]), (60, [0.0, 0.0]), (120, [0.0, 0.01])) == []
    assert reported((0, one), (30, [0.0, 0.0]), (60, one), (89, one)) == []
    assert reported((0, one), (30, [0.9, None]), (60, one)) == []
    assert reported((0, one), (30, []), (60, one)) == []
    assert reported((0, [0.0, 0.9, 0.0, 0.04]), (60, [0.0, 0.9, 0.0, 0.06])) == [(60, [0, 2])]
    assert reported((0, [0.0]), (60, [0.0])) == []


def test_the_line_has_low_mean_and_high_of_what_is_known() -> None:
    values = {
        "utilisation_by_device": [0.98, 0.0, 0.04, None],
        "memory_bytes_by_device": [1 << 30] * 4,
        "power_watts_by_device": [690.2, 120.0, None, None],
        "cores_by_process": [1.0],
        "host_utilisation": 0.5,
    }
    assert (
        load_line(Event("sensors", 7, values))
        == "load   step 7  use 0% .. 34% .. 98%  mem 1.0 GiB  power 120 W .. 405 W .. 690 W  cores"
        " 1.0  host 50%"
    )
    assert load_line(Event("sensors", 7, {})) == "load   step 7"
