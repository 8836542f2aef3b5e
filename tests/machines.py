"""Several "machines" on this one: network namespaces, each with an address and a host name of its
own, joined by a bridge. They share the file system, as machines with a network disk do.
"""

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from commands import command

_SUBNET = "10.213.7"


def needs_machines() -> pytest.MarkDecorator:
    """Skips a test where namespaces can't be made."""
    able = os.geteuid() == 0 and bool(shutil.which("ip")) and bool(shutil.which("unshare"))
    if able:
        made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
        able = made.returncode == 0
    return pytest.mark.skipif(not able, reason="network namespaces need root and iproute2")


@dataclass
class Machine:
    """One namespace."""

    name: str  # its host name
    namespace: str
    address: str
    link: str  # its interface
    hosts: Path  # in place of /etc/hosts, where the machines know each other's names
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(
        self, *arguments: object, cwd: Path, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start the program there. Its output and errors are one."""
        return self.start_command(command(*arguments), cwd=cwd, env=env)

    def start_command(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        names: bool = False,
    ) -> "subprocess.Popen[str]":
        """names: the machines know each other's host names."""
        prepare = f"mount --bind {self.hosts} /etc/hosts && " if names else ""
        inside = ["sh", "-c", f'{prepare}hostname "$0" && exec "$@"', self.name, *words]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", *inside],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def pids(self) -> list[int]:
        """All processes of this machine."""
        done = run("ip", "netns", "pids", self.namespace)
        return [int(line) for line in done.split()]

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        found = []
        for pid in self.pids():
            with suppress(psutil.Error):
                if psutil.Process(pid).cmdline()[:2] == ["samecurve", "rank"] or (
                    "samecurve rank" in " ".join(psutil.Process(pid).cmdline())
                ):
                    found.append(pid)
        return found

    def power_off(self) -> None:
        """The whole machine is gone, without a word."""
        self.cut()
        for pid in self.pids():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        """Its network is down."""
        run("ip", "-n", self.namespace, "link", "set", self.link, "down")

    def mend(self) -> None:
        run("ip", "-n", self.namespace, "link", "set", self.link, "up")


def run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@contextmanager
def machines(count: int, home: Path) -> Iterator[list[Machine]]:
    """So many machines, gone with all their processes after the block. home: for a file."""
    addresses = [f"{_SUBNET}.{index + 1}" for index in range(count)]
    lines = ["127.0.0.1 localhost", *(f"{a} node{i}" for i, a in enumerate(addresses))]
    (home / "hosts").write_text("\n".join(lines) + "\n")
    mark = uuid.uuid4().hex[:6]
    hub = f"sc-{mark}-hub"
    made = []
    run("ip", "netns", "add", hub)
    try:
        run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge", "up")
        for index in range(count):
            made.append(_add_machine(hub, f"sc-{mark}-{index}", index, home / "hosts"))
        yield made
    finally:
        for machine in made:
            for pid in machine.pids():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            for process in machine.processes:
                process.wait(10)
                if process.stdout:
                    process.stdout.close()
            run("ip", "netns", "del", machine.namespace)
        run("ip", "netns", "del", hub)


def _add_machine(hub: str, namespace: str, index: int, hosts: Path) -> Machine:
    run("ip", "netns", "add", namespace)
    link, port = "net0", f"port{index}"
    run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", link)
    run("ip", "-n", hub, "link", "set", link, "netns", namespace)
    run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
    address = f"{_SUBNET}.{index + 1}"
    run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", link)
    for name in ("lo", link):
        run("ip", "-n", namespace, "link", "set", name, "up")
    return Machine(f"node{index}", namespace, address, link, hosts)
