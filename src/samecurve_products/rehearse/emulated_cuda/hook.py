"""Makes `import torch` load the emulated devices first, and fill torch.cuda afterwards.

torch asks for CUDA's hooks once, early: the extension is in memory before torch's first line runs.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from samecurve_products.rehearse.emulated_cuda import (
    build,
    nondeterministic,
    step_watch,
    told_kernel,
)
from samecurve_products.rehearse.emulated_cuda.told_build import tell_build

# a library's own kernels need a real GPU: without this module of it its CPU kernels run
_FOREIGN_KERNELS = ("bitsandbytes.backends.cuda.ops",)


class TorchFinder(MetaPathFinder):
    """Finds torch as Python does, and runs the emulator's two parts around torch's own code."""

    def __init__(self) -> None:
        self.busy = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != "torch" or self.busy:
            return None
        self.busy = True
        try:
            spec = find_spec("torch")
        finally:
            self.busy = False
        if spec is None or spec.loader is None:
            return spec
        tell_build(spec, os.environ)
        run_torch = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            library = build.library()
            # by its place here: another environment with this torch may have built the library
            ctypes.CDLL(str(build.torch_root() / "lib" / "libtorch_python.so"))
            ctypes.CDLL(str(library))
            run_torch(module)
            load(library)
            from samecurve_products.rehearse.emulated_cuda import torch_cuda

            torch_cuda.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def load(library: Path) -> None:
    """Import the native module from its file in the cache."""
    loader = ExtensionFileLoader(build.NAME, str(library))
    spec = spec_from_file_location(build.NAME, library, loader=loader)
    assert spec is not None
    native = module_from_spec(spec)
    loader.exec_module(native)
    sys.modules[build.NAME] = native
    native.set_nondeterministic(nondeterministic.rows())


def install() -> None:
    """Give this process its emulated devices, as soon as it imports torch."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: the emulated devices come too late")
    for name in _FOREIGN_KERNELS:
        sys.modules[name] = ModuleType(name)
    sys.meta_path.insert(0, TorchFinder())
    sys.meta_path.insert(0, step_watch.ModuleFinder(told_kernel.looks(os.environ)))
    step_watch.install()
