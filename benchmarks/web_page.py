"""How fast the web page opens long runs, and what its server costs.

Journals of 10,000 and 1,000,000 steps are written, `samecurve ui` is started beside them, and the
page of each run is opened in Chromium: seconds until its curves are drawn, bytes over the network,
and the CPU time and memory of the server. Then ten tabs watch a run that goes on. Writes
benchmarks/results/web-page-<cpu>.json. Run: python -m benchmarks.web_page (the extra `dev`, and
Debian's chromium).
"""

import argparse
import fcntl
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from benchmarks.page import publish

CHROMIUM = "/usr/bin/chromium"
_STEPS = (10_000, 1_000_000)
_TABS = 10
_CONFIG = Path(__file__).parent.parent / "models" / "tiny.yaml"


def _short_run(home: Path) -> Path:
    """A real run of a few steps, whose plan and first lines the long ones take."""
    run = home / "short"
    command = [sys.executable, "-m", "samecurve", "train", "-f", str(_CONFIG), "--devices", "cpu"]
    command += ["--max-steps", "3", "--save-dir", str(run)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return run


def step_line(step: int, began: float, noise: random.Random) -> bytes:
    """A line as the journal of a run has it, about 300 bytes."""
    seconds = 0.05 * (1 + noise.random())
    values = {
        "time": round(began + 0.075 * step, 3),
        "step": step,
        "kind": "step",
        "loss": 2 + 4 * math.exp(-step / 1e5) + 0.1 * noise.random(),
        "grad_norm": 1 + noise.random(),
        "lr": 3e-4 * (0.55 + 0.45 * math.cos(step / 320_000)),
        "samples_per_second": 32 / seconds,
        "seconds": seconds,
        "wait_seconds": 0.001 * noise.random(),
        "memory_bytes": 501_764_096,
        "tokens_per_second": 4096 / seconds,
        "flops_per_second": 1e11 * noise.random(),
    }
    return json.dumps(values).encode() + b"\n"


def write_long_run(short: Path, run: Path, steps: int) -> None:
    """A run directory with so many steps in its journal, and the other files of the short run."""
    run.mkdir()
    for name in ("plan.json", "config.yaml"):
        content = (short / name).read_text()
        (run / name).write_text(re.sub(r'("?steps"?: )3\b', rf"\g<1>{steps}", content))
    lines = (short / "journal.jsonl").read_bytes().splitlines(keepends=True)
    first_step = next(i for i, line in enumerate(lines) if b'"kind": "step"' in line)
    began, noise = json.loads(lines[0])["time"], random.Random(0)
    with open(run / "journal.jsonl", "wb") as file:
        file.writelines(lines[:first_step])
        for step in range(1, steps + 1):
            file.write(step_line(step, began, noise))
            if step % 10_000 == 0:
                held = {"time": began + 0.075 * step, "step": step, "kind": "evaluated"}
                file.write(json.dumps(held | {"loss": 3.0, "seconds": 1.0}).encode() + b"\n")


class Server:
    """`samecurve ui` as a process of its own, and what it has cost so far."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-m", "samecurve", "ui", str(root), "--port", "0"]
        began = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"http://\S+", line):
                self.url = found[0]
                break
        self.start_seconds = time.perf_counter() - began
        self._measured = psutil.Process(self._process.pid)

    def cpu_seconds(self) -> float:
        """CPU time of the server itself, without the processes that it has started."""
        times = self._measured.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        return int(self._measured.memory_info().rss)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def _run_ids(context: BrowserContext, origin: str) -> dict[str, str]:
    rows = context.request.get(f"{origin}/api/runs").json()["runs"]
    return {row["name"].rpartition("/")[2]: row["id"] for row in rows}


def _wait_for_index(context: BrowserContext, origin: str, run_id: str) -> float:
    """Seconds until the server has read the whole journal."""
    began = time.perf_counter()
    while context.request.get(f"{origin}/api/runs/{run_id}/page").json()["reading"] < 1:
        time.sleep(0.25)
    return time.perf_counter() - began


def _curves_are_drawn(page: Page) -> None:
    page.wait_for_selector("figure .u-over", timeout=120_000)


def _opened(context: BrowserContext, server: Server, url: str) -> dict[str, float]:
    """Open a page in a new tab: seconds until its curves stand, bytes, the server's CPU time."""
    page = context.new_page()
    received: list[int] = []
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    session.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
    cpu, began = server.cpu_seconds(), time.perf_counter()
    page.goto(url)
    _curves_are_drawn(page)
    seconds = time.perf_counter() - began
    cpu = server.cpu_seconds() - cpu
    page.close()
    return {"ready_seconds": seconds, "bytes": sum(received), "server_cpu_seconds": cpu}


@contextmanager
def _going_on(run: Path, step: int) -> Iterator[None]:
    """Hold the run's lock and append a step to its journal 20 times a second."""
    stop, noise = threading.Event(), random.Random(1)

    def write() -> None:
        done = step
        with open(run / "journal.jsonl", "ab", buffering=0) as file:
            while not stop.wait(0.05):
                done += 1
                file.write(step_line(done, time.time() - 0.075 * done, noise))

    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        holder = {"host": os.uname().nodename, "pid": os.getpid(), "since": time.time()}
        lock.write(json.dumps(holder))
        lock.flush()
        thread = threading.Thread(target=write)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _watched(
    context: BrowserContext, server: Server, url: str, run: Path, seconds: float
) -> dict[str, float]:
    """Ten tabs that show a live run: the server's CPU share and memory, and its answers' times."""
    with _going_on(run, _STEPS[-1]):
        pages = [context.new_page() for _ in range(_TABS)]
        answers: list[float] = []
        for page in pages:
            page.on("requestfinished", lambda done: answers.append(done.timing["responseEnd"]))
            page.goto(url)
            _curves_are_drawn(page)
        answers.clear()
        cpu, began, most = server.cpu_seconds(), time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            pages[0].wait_for_timeout(1000)
            most = max(most, server.resident_bytes())
        cpu = server.cpu_seconds() - cpu
        for page in pages:
            page.close()
    answers.sort()
    return {
        "tabs": _TABS,
        "seconds": passed,
        "requests": len(answers),
        "server_cpu_share": cpu / passed,
        "server_bytes": most,
        "answer_ms_median": answers[len(answers) // 2],
        "answer_ms_99": answers[int(len(answers) * 0.99)],
    }


def measure(browser: Browser, home: Path, watch_seconds: float) -> dict[str, Any]:
    root = home / "root"
    (root / "runs").mkdir(parents=True)
    short = _short_run(home)
    for steps in _STEPS:
        write_long_run(short, root / "runs" / str(steps), steps)
    server = Server(root)
    try:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.new_page().goto(server.url)
        origin = server.url.partition("/?")[0]
        ids = _run_ids(context, origin)
        result: dict[str, Any] = {"start_seconds": server.start_seconds, "runs": {}}
        for steps in _STEPS:
            journal = root / "runs" / str(steps) / "journal.jsonl"
            read_seconds = _wait_for_index(context, origin, ids[str(steps)])
            url = f"{origin}/#/run/{ids[str(steps)]}"
            turns = [_opened(context, server, url) for _ in range(3)]
            middle = sorted(turns, key=lambda turn: turn["ready_seconds"])[1]
            result["runs"][str(steps)] = {
                "journal_bytes": journal.stat().st_size,
                "read_seconds": read_seconds,
                **middle,
                "server_bytes": server.resident_bytes(),
            }
        long_run = root / "runs" / str(_STEPS[-1])
        url = f"{origin}/#/run/{ids[str(_STEPS[-1])]}"
        result["watched"] = _watched(context, server, url, long_run, watch_seconds)
        return result
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="of watching by ten tabs")
    parser.add_argument("--dry", action="store_true", help="write no result file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        os.environ["SAMECURVE_CACHE"] = f"{home}/cache"
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        result = measure(browser, Path(home), arguments.seconds)
        browser.close()
    publish("web-page", result, is_kept=not arguments.dry)


if __name__ == "__main__":
    main()
