"""Bytes, seconds, counts and lists as people write and read them.

Sizes are binary (GiB), counts decimal (1.1M).
"""

import math
import re
from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def show_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    power = min(int(math.log(count, 1024)), len(_BINARY) - 1) if count >= 1 else 0
    decimals = 1 if power else 0
    return f"{count / 1024**power:.{decimals}f} {_BINARY[power]}"


def parse_bytes(text: str) -> int:
    """'1.5GiB' -> 1610612736; '80 GB' -> 80_000_000_000. ValueError: not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?)B", text.strip())
    if not match:
        raise ValueError("must be a number of bytes, or a size such as 40GiB or 80GB")
    number, prefix, binary = match.groups()
    if float(number) > 1e15:
        raise ValueError(f"must be a size that there is, not {number[:20]}... {prefix}{binary}B")
    return int(float(number) * (1024 if binary else 1000) ** " KMGTP".index(prefix or " "))


def parse_speed(text: str) -> float:
    """'400 Gb/s' -> 5e10 bytes a second; '50 GB/s' the same. ValueError: neither."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])([bB])/s", text.strip())
    if not match:
        raise ValueError(
            "must be a number of bytes a second, or a speed such as 50 GB/s or 400 Gb/s"
        )
    number, prefix, unit = match.groups()
    return float(number) * 1000.0 ** " KMGT".index(prefix) / (8 if unit == "b" else 1)


def show_count(count: float) -> str:
    """1_058_176 -> '1.06M'."""
    if abs(count) < 1:
        return f"{count:.3g}"
    power = min(int(math.log(abs(count), 1000) + 1e-12), len(_DECIMAL) - 1)
    return f"{count / 1000**power:.3g}{_DECIMAL[power]}"


def show_rate(bytes_per_second: float) -> str:
    """25_000_000_000 -> '25GB/s'."""
    return f"{show_count(bytes_per_second)}B/s"


def show_params(count: int) -> str:
    """1_040_000_000 -> '1.04B', as models are named."""
    return show_count(count).replace("G", "B")


def show_seconds(seconds: float) -> str:
    """0.0083 -> '8 ms'; 75 -> '1m15s'; 7300 -> '2h01m'."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def join_words(words: Sequence[str]) -> str:
    """['1', '2', '3'] -> '1, 2 and 3'."""
    *first, last = words or [""]
    return f"{', '.join(first)} and {last}" if first else last


def show_time(seconds: float) -> str:
    """Three digits, whatever the size: 0.0083 -> '8.3 ms'; 75 -> '75 s'."""
    for unit_seconds, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit_seconds:
            count = seconds / unit_seconds
            digits = f"{count:.3g}" if count < 1000 else f"{count:.0f}"
            return f"{digits} {unit}"
    return f"{seconds * 1e6:.3g} us"


def first_and_count(names: Sequence[str]) -> str:
    """['a', 'b', 'c'] -> 'a and 2 more'."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def some(names: Sequence[str], most: int) -> str:
    """(['a', 'b', 'c', 'd'], 2) -> 'a, b and 2 more'."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def counted(number: int, noun: str) -> str:
    """(1, 'round') -> '1 round'; (2, 'microbatch') -> '2 microbatches'."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 'sh')) else 's'}"
