"""Remedies name a command that works for this copy: a checkout by its path, a wheel by its name.
What fails while a failure is handled does not hide it.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from samecurve.core.system import (
    directory_made_once,
    explain_os_error,
    one_at_a_time,
    write_json,
)
from samecurve.core.system.cache import MANIFEST, cache_entry
from samecurve.core.system.installation import install_command
from samecurve.errors import closing_all, not_hiding

ROOT = Path(__file__).parents[1]
# a line that would ask an index for this package
BY_NAME = re.compile(r"""pip3? install (?:-\S+ )*['"]?samecurve(?![\w.-])""")
TEXTS = {".py", ".md", ".yaml", ".toml", ".sh", ".bat", ".js", ".html", ".ipynb"}
MODULE = "core/system/installation.py"
ASK = (
    "from samecurve.core.system.installation import install_command; print(install_command('jax'))"
)


def test_a_file_of_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", [1])
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", [2, object()])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["[\n 1\n]"]


def test_what_fails_in_a_handler_does_not_hide_what_it_handles() -> None:
    calls: list[str] = []

    def fail(error: Exception) -> None:
        raise error

    def closer(name: str, error: Exception | None = None) -> Callable[[], None]:
        def close() -> None:
            calls.append(name)
            if error:
                raise error

        return close

    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(ValueError, match="the cause") as caught,
        closing_all(closer("first"), closer("second", full), closer("third")),
    ):
        fail(ValueError("the cause"))
    assert calls == ["first", "second", "third"]
    assert caught.value.__notes__ == [
        "and, at the end: OSError: [Errno 28] No space left on device"
    ]
    with pytest.raises(OSError, match="No space"), closing_all(closer("", full), closer("last")):
        pass
    assert calls[-1] == "last"
    cause = ValueError("the cause")
    with not_hiding(cause):
        fail(full)
    assert len(cause.__notes__) == 1


def test_errors_of_a_disk_name_the_path_and_a_remedy(tmp_path: Path) -> None:
    def explained(number: int, path: Path) -> str:
        cause, remedy = explain_os_error(OSError(number, os.strerror(number)), path, "try again")
        return f"{cause}; {remedy}"

    gone = tmp_path / "run" / "checkpoints"
    assert explained(errno.ENOENT, gone) == (
        f"{tmp_path}/run is missing: removed or renamed, or its disk is not mounted; put it back"
        " where it was, and try again (what was moved as a whole: under its new name)"
    )
    assert explained(errno.EROFS, tmp_path).startswith(f"{tmp_path}: its file system is read-only")
    assert explained(errno.ENOSPC, tmp_path) == (
        f"{tmp_path}: no space is left on its disk; free some space (`df -h`), and try again"
    )
    assert explained(errno.ELOOP, tmp_path).startswith(f"{tmp_path}: Too many levels of symbolic")


def test_a_checkout_is_named_by_its_path() -> None:
    assert install_command("jax").endswith(f"pip install -e '{ROOT}[jax]'")


def test_pip_is_named_by_its_python_where_another_one_is_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "pip"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install_command("jax").startswith(f"{sys.executable} -m pip install ")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert install_command("jax").startswith("pip install ")


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "samecurve[jax]"),  # from an index
        ('{"url": "file:///x/samecurve-0.1.0-py3-none-any.whl", "archive_info": {}}', None),
        (f'{{"url": "file://{ROOT}", "dir_info": {{}}}}', f"{ROOT}[jax]"),  # pip install DIRECTORY
    ],
)
def test_an_installed_wheel_is_named_by_name(
    tmp_path: Path, origin: str | None, expected: str | None
) -> None:
    """Only the files that a wheel would put there, on a path without the checkout."""
    package = tmp_path / "site/samecurve"
    package.mkdir(parents=True)
    for file in ("__init__.py", "core/__init__.py", "core/system/__init__.py", MODULE):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src/samecurve" / file, package / file)
    info = tmp_path / "site/samecurve-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: samecurve\nVersion: 0.1.0\n")
    if origin:
        (info / "direct_url.json").write_text(origin)
    answer = subprocess.run(
        [sys.executable, "-S", "-c", ASK],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout
    assert (expected or "samecurve[jax]") in answer


@pytest.mark.skipif(sys.platform != "linux", reason="names of processes are Linux's")
@pytest.mark.parametrize(("rank", "short"), [(1, "samecurve-rank1"), (12, "samecurve-r12")])
def test_a_rank_has_a_name_in_ps_and_in_top(rank: int, short: str) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from samecurve.core.system.process_name import name_rank\n"
        f"name_rank({rank})\n"
        "print(Path('/proc/self/comm').read_text(), end='')\n"
        "print(Path('/proc/self/cmdline').read_text().split(chr(0))[0])\n"
    )
    command = [sys.executable, "-c", script, "an argument", "another"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout == f"{short}\nsamecurve rank {rank}\n"


def test_reading_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """However large it might be: a manifest may have a gigabyte, and a rank little left."""
    (tmp_path / "file").write_bytes(b"small")
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from samecurve.core.system import read_file_bytes\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        "most = pages * resource.getpagesize() + (32 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "sys.stdout.buffer.write(read_file_bytes(Path('file'), 1 << 30))\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == b"small"


def test_an_entry_of_the_cache_is_whole_or_made_again(tmp_path: Path) -> None:
    home = tmp_path / ("a" * 24)
    made: list[Path] = []
    said: list[str] = []

    def make(scratch: Path) -> None:
        made.append(scratch)
        (scratch / "tokens.bin").write_bytes(bytes(range(256)) * 5000)

    def entry() -> bytes:
        return (cache_entry(home, make, say=said.append) / "tokens.bin").read_bytes()

    whole = entry()
    assert (entry(), len(made), said) == (whole, 1, [])
    for name, place in (("tokens.bin", 1_100_000), (MANIFEST, 3), ("tokens.bin", 0)):
        before = (home / name).stat()
        with open(home / name, "r+b") as file:
            file.seek(place)
            file.write(b"\xff\xfe")
        os.utime(home / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert entry() == whole
        assert name in said[-1]
    assert len(made) == 4
    os.utime(home / "tokens.bin")  # as a copy of the cache has other times
    assert entry() == whole
    assert len(made) == 4


def test_two_processes_of_one_id_fill_directories_of_their_own(tmp_path: Path) -> None:
    """Containers that share a cache have equal ids; what a killed one left is removed."""
    home = tmp_path / ("b" * 24)
    left, former = tmp_path / f"{home.name}.7.00c0ffee.part", tmp_path / f"{'c' * 24}.7"
    left.mkdir()
    former.mkdir()
    mine = tmp_path / "run.2024"
    mine.mkdir()
    with directory_made_once(home) as first:
        (first / "a").write_text("1")
        with directory_made_once(home) as second:
            assert first != second
            assert (first / "a").exists()
            (second / "a").write_text("2")
    assert (home / "a").read_text() == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == [home.name, mine.name]


def test_a_lock_that_its_holder_removes_still_lets_one_in(tmp_path: Path) -> None:
    """A waiting process must not take the lock of a file that has gone."""
    lock, inside, most = tmp_path / "x.lock", [0], [0]

    def enter() -> None:
        for _ in range(50):
            with one_at_a_time(lock):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_every_install_command_on_a_page_or_in_a_message_works() -> None:
    """The name of this package is on no index: it is installed from a checkout or from a wheel."""
    places = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Dockerfile", ROOT / "Makefile"]
    for folder in ("src", "docs", "scripts", "examples", "models", "benchmarks", "tests"):
        places += [path for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    places.remove(Path(__file__))
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in places
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if BY_NAME.search(line)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "works"),
    [
        ("pip install 'samecurve[ui]'", False),
        ('python -m pip install -U "samecurve"', False),
        ("uv pip install samecurve[jax]", False),
        ("pip install -e '.[ui]'", True),
        ("pip install samecurve-0.2.0-py3-none-any.whl", True),
    ],
)
def test_a_command_that_asks_an_index_is_found(line: str, *, works: bool) -> None:
    assert bool(BY_NAME.search(line)) is not works
