"""The module of native/process_group.cpp, which lies in the same library as the devices."""

from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import TYPE_CHECKING

import emulated_cuda_native as native

__all__ = ["cpp"]
_NAME = "emulated_cuda_process_group"


def _load() -> ModuleType:
    loader = ExtensionFileLoader(_NAME, native.__file__)
    spec = spec_from_file_location(_NAME, native.__file__, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


if TYPE_CHECKING:
    import emulated_cuda_process_group as cpp
else:
    cpp = _load()
