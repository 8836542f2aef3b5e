"""Lets a program that reads torch's version.py, and imports nothing, see a CUDA build.

torch itself says which build it is by torch.version, which the emulator sets as torch is imported.
A program that must not import torch finds the package (importlib.util.find_spec) and reads the
file version.py beside its origin. So the emulator's finder gives torch's spec another origin: a
directory with torch's own version.py, in which the line of CUDA, or of HIP, has a version.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

from samecurve_products.rehearse.emulated_cuda import build, gpus


def tell_build(spec: ModuleSpec, environment: Mapping[str, str]) -> None:
    """Give torch's spec the origin that tells of CUDA or HIP; the module keeps its own __file__.

    spec: of the installed torch, a build for the CPU
    """
    loader = spec.loader
    if not isinstance(loader, SourceFileLoader):
        raise RuntimeError(f"torch is loaded by {loader}, and not from a file")
    file, execute = loader.path, loader.exec_module

    def exec_module(module: ModuleType) -> None:
        module.__file__ = file
        execute(module)

    spec.origin = str(_told_version(Path(file), environment).with_name("__init__.py"))
    loader.exec_module = exec_module  # type: ignore[method-assign]


def _told_version(torch: Path, environment: Mapping[str, str]) -> Path:
    """A version.py that tells of CUDA or HIP, in the cache. torch: the package's __init__.py"""
    is_amd = bool(gpus.emulated_machine(environment, gpus.AMD).gpus)
    name, version = ("hip", gpus.HIP) if is_amd else ("cuda", gpus.CUDA)
    real = torch.with_name("version.py")
    text = real.read_text()
    told = re.sub(rf"^({name}\b[^=]*)= None$", rf"\1= '{version}'", text, flags=re.MULTILINE)
    if told == text:
        raise RuntimeError(f"{real} is not that of a CPU build: no line says {name} = None")
    key = hashlib.sha256(told.encode()).hexdigest()[:12]
    place = build.cache_home() / f"told-{key}" / "version.py"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = place.with_name(f".{os.getpid()}")
        fresh.write_text(told)
        fresh.replace(place)
    return place
