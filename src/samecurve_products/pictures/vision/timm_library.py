"""timm: its import, its models by name, and models of it with first values of their own.

timm imports torchvision for its readers of data and for drawings, which nothing here uses. Where
torchvision is missing, or is of another build than torch and can't be imported, names without
content stand in for it while timm is imported, and are taken away again.
"""

import difflib
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import nn

from samecurve.seam import UserError, install_command

_NEAR = 3  # names that an error suggests
_UNUSED = "torchvision"


@cache
def import_timm() -> Any:
    """The package timm. UserError: it is not installed."""
    try:
        if _imports_torchvision():
            return importlib.import_module("timm")
        with _stand_in():
            return importlib.import_module("timm")
    except ImportError as error:
        raise UserError(
            f"model.backbone needs timm: {error}", install_command("vision"), "model.backbone"
        ) from None


def _imports_torchvision() -> bool:
    try:
        importlib.import_module(_UNUSED)
    except (ImportError, RuntimeError):  # missing, or its operators are of another build
        _forget()
        return False
    return True


@contextmanager
def _stand_in() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == _UNUSED]:
        del sys.modules[name]


class _Finder(MetaPathFinder, Loader):
    """Finds torchvision and all of its modules, each without content."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] != _UNUSED:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: there is no content."""


class _Module(ModuleType):
    """A module that has a class of any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Named(type):
    """A class that has an attribute of any name: its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def check_name(name: str) -> None:
    """UserError: timm has no model of this name; near names are suggested."""
    timm = import_timm()
    if timm.is_model(name):
        return
    if ":" in name:
        raise UserError(
            f"model.backbone {name} would be downloaded, which Samecurve does not do",
            "the model's name alone, and model.path: a file or directory with its weights",
            "model.backbone",
        )
    names = timm.list_models()
    near = difflib.get_close_matches(name, names, _NEAR, 0.5)
    raise UserError(
        f"timm {timm.__version__} has no model {name}",
        f"did you mean {' or '.join(near)}?" if near else "timm.list_models() names them",
        "model.backbone",
    )


def create(name: str, **options: Any) -> nn.Module:
    """A model of timm with its own first values. UserError: timm can't build it so."""
    timm = import_timm()
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **options)
    except (TypeError, ValueError, AssertionError, RuntimeError, AttributeError) as error:
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise UserError(
            f"timm can't build {name} with {given}: {type(error).__name__}: {error}",
            "another model.backbone, or without those fields of `model` and `data.resolution`",
            "model.backbone",
        ) from None
    return model


def config_of(name: str) -> Any:
    """timm's own facts of a model: input_size, mean, std, fixed_input_size, classifier."""
    import_timm()
    models: Any = importlib.import_module("timm.models")
    return models.get_pretrained_cfg(name)
