"""Builds the emulator's extension for the torch of this Python, once for each torch and sources.

The library lies outside the clone, in the user's cache. Two processes may ask at the same time:
a file lock lets one build, and a rename publishes the whole library or none.
`python -m samecurve_products.rehearse.emulated_cuda.build` builds it and prints its path,
or why it cannot be had here.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

NAME = "emulated_cuda_native"
# Tried with tests/emulated_cuda. Others need a CPU build to be tried with: torch's wheels for Linux
# on PyPI are CUDA builds, and the wheels of CPU builds before and after 2.13 could not be had.
TORCH_VERSIONS = ("2.13",)
SOURCES = Path(__file__).parent / "native"
FLAGS = (
    "-O1",
    "-g0",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unused-function",
)
# hook.py loads them before: the place of a torch is not written into a library that several share
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")


class CannotEmulateError(RuntimeError):
    """This machine or this torch cannot have emulated devices; the text says why."""


def torch_root() -> Path:
    """The folder of the installed torch, found without importing torch."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CannotEmulateError("torch is not installed: pip install torch (a CPU build)")
    return Path(spec.submodule_search_locations[0])


def why_not() -> str | None:
    """Why emulated devices cannot be had here, or None if they can."""
    try:
        root, torch_version = torch_root(), version("torch")
    except (CannotEmulateError, PackageNotFoundError) as error:
        return str(error)
    if not torch_version.startswith(tuple(known + "." for known in TORCH_VERSIONS)):
        known = ", ".join(TORCH_VERSIONS)
        return f"the emulator knows torch {known}; torch {torch_version} is installed"
    if list((root / "lib").glob("libtorch_cuda*")) or list((root / "lib").glob("libtorch_hip*")):
        return f"torch {torch_version} has CUDA devices of its own: the emulator needs a CPU build"
    if not sys.platform.startswith("linux"):
        return f"the emulator runs on Linux, not on {sys.platform}"
    if lacks_compiler():
        return "g++ is missing: apt-get install g++"
    return None


def lacks_compiler() -> bool:
    """Whether the library has to be compiled, and there is no g++."""
    return shutil.which("g++") is None and not built_library().exists()


def library() -> Path:
    """The built library; builds it where it is missing (about half a minute)."""
    reason = why_not()
    if reason is not None:
        raise CannotEmulateError(reason)
    built = built_library()
    if built.exists():
        return built
    place = built.parent
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=place) as folder:
                os.replace(compile_all(Path(folder)), built)
    return built


def built_library() -> Path:
    """Where the library lies, once it is built."""
    return cache_folder() / f"{NAME}.so"


def cache_home() -> Path:
    """The directory of all that the emulator keeps."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "samecurve" / "emulated-cuda"


def cache_folder() -> Path:
    """The folder of the library for this torch, this Python and these sources."""
    parts = [sys.version.encode(), " ".join(FLAGS + LIBRARIES).encode()]
    parts += [file.name.encode() + file.read_bytes() for file in sorted(SOURCES.iterdir())]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return cache_home() / f"{version('torch')}-{digest}"


def compile_all(folder: Path) -> Path:
    """Compile each source, two at a time and the slowest first, and link them in the folder."""
    root = torch_root()
    includes = [root / "include", root / "include/torch/csrc/api/include"]
    options = [*FLAGS, f"-DTORCH_EXTENSION_NAME={NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    options += [f"-isystem{path}" for path in (*includes, sysconfig.get_paths()["include"])]
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -slowness(source))
    headers = b"".join(header.read_bytes() for header in sorted(SOURCES.glob("*.h")))
    # an object is the same for any environment with this torch: where that lies is left out
    common = " ".join([version("torch"), sys.version, NAME, *FLAGS]).encode() + headers

    def compiled(source: Path) -> Path:
        """The object file: what another build has left for the same text, or a new one."""
        digest = hashlib.sha256(common + source.read_bytes()).hexdigest()[:16]
        kept = folder.parent.parent / "objects" / f"{source.stem}-{digest}.o"
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            fresh = folder / f"{source.stem}.o"
            run(["g++", *options, "-c", str(source), "-o", str(fresh)])
            os.replace(fresh, kept)
        return kept

    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        objects = list(pool.map(compiled, sources))
    built = folder / f"{NAME}.so"
    run(["g++", "-shared", *map(str, objects), f"-L{root}/lib", *LIBRARIES, "-o", str(built)])
    return built


def slowness(source: Path) -> int:
    """A source's share of the build: what includes most of torch compiles longest."""
    text = source.read_text()
    return 10 * text.count("torch/extension.h") + 5 * text.count("torch/") + text.count("#include")


def run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CannotEmulateError(f"the emulator does not build:\n{done.stderr[-6000:]}")


if __name__ == "__main__":
    reason = why_not()
    print(f"no emulated GPUs here: {reason}" if reason else library())
