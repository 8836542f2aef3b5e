"""Doubts about measurements: speed-ups that are not plausible, and a machine that was busy."""

from collections.abc import Sequence

from samecurve_products.report.bench_blocks import Row

_ODD = 1.1  # a speed-up beyond this multiple of its bound is doubtful


def speedup_bound(base: Row, row: Row, cores: int | None) -> float:
    """The bound of a layout's speed-up: its devices (CPU ranks: cores) divided by the baseline's.

    cores: of the machine, where the devices are CPU ranks; None: they are GPUs
    """
    if cores is not None and row["engine"] == "torch":
        used, used_by_base = (min(one["world"] * one["threads"], cores) for one in (row, base))
        return float(used / used_by_base)
    return float(row["world"] / base["world"])


def doubtful_speedups(base: Row, rows: Sequence[Row], cores: int | None, prefix: str = "") -> str:
    """A line that names layouts which were faster than possible; '': there are none.

    prefix: before the layouts' names
    """
    names = [
        row["layout"] for row in rows if row["speedup"] > _ODD * speedup_bound(base, row, cores)
    ]
    if not names:
        return ""
    doubt = (
        f"odd    {prefix}{', '.join(names)}: faster than {'devices' if cores is None else 'cores'}"
        f" explain, so {base['layout']} was held up, or a smaller share fits caches better"
    )
    if cores is None:
        return doubt
    return (
        f"{doubt}. Threads of one process wait for each other at every operation: where other"
        " programs want the cores, that costs most"
    )


def busy_machine(load: float, cores: int | None) -> str:
    """A line on cores that other programs wanted; '': they did not, or the devices are GPUs.

    load: the load average when the measurement began
    """
    if cores is None or load <= max(1.0, cores / 2):
        return ""
    return (
        f"busy   other programs wanted the cores when this began (load {load:.1f} on {cores}): the"
        " measurements are noisy"
    )
