"""Seconds a step and peak memory of each strategy on two ranks, beside one device; real runs of the
program, alternating.

Prints a table; writes benchmarks/results/strategies-<machine>.json. Run: python -m
benchmarks.strategies [--devices 0,1] [CONFIG] Without --devices: CPU ranks (which share this
machine's cores, so two of them can't be twice as fast as one with all cores).
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.page import publish
from samecurve.observe import read_events
from samecurve.probe import cpu_name, probe

STEPS, SKIPPED, ALTERNATIONS = 30, 8, 3


def trained(config: str, strategy: str, devices: str, home: Path) -> tuple[float, list[int]]:
    """(median seconds of a step after the first few, peak bytes by device)."""
    flags = [
        "--strategy",
        strategy,
        "--devices",
        devices,
        "--max-steps",
        str(STEPS),
        "--warmup",
        "5",
        "--set",
        "train.eval_every=0",
        "--set",
        "train.save_every=0",
        "--set",
        "data.eval_samples=1",
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "samecurve",
            "train",
            "-f",
            config,
            *flags,
            "--save-dir",
            str(home),
            "--resume",
            "never",
            "--headless",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{strategy} on {devices}: exit {done.returncode}\n{done.stderr}")
    events = read_events(home / "journal.jsonl")
    seconds = [event.values["seconds"] for event in events if event.kind == "step"]
    return statistics.median(seconds[SKIPPED:]), events[-1].values["memory_bytes_by_device"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="models/tiny.yaml")
    parser.add_argument("--devices", default="cpu:2")
    given = parser.parse_args()
    first = "cpu" if given.devices.startswith("cpu") else given.devices.split(",")[0]
    sides = {"single": first, "dp": given.devices, "ddp": given.devices, "fsdp": given.devices}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    memory: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(ALTERNATIONS):
            for name, devices in sides.items():
                found, memory[name] = trained(
                    given.config, name, devices, Path(scratch, f"{name}-{turn}")
                )
                seconds[name].append(found)
    machine = cpu_name() if first == "cpu" else probe().devices[0].name
    result = {
        "devices": given.devices,
        "config": given.config,
        "seconds": seconds,
        "memory_bytes": memory,
    }
    publish("strategies", result, machine=machine)


if __name__ == "__main__":
    main()
