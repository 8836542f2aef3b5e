"""Whether the installed engines can use this machine's GPUs.

Their files tell; neither engine is imported.
"""

import ast
import pkgutil
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from samecurve.core.planning.machine import AMD, NVIDIA, UnfitEngine
from samecurve.core.system.installation import installed_by_conda, pip_command

_PLATFORM = {NVIDIA: "CUDA", AMD: "ROCm"}
_JAX_EXTRA = "cuda13"


@dataclass(frozen=True)
class TorchBuild:
    """The build of the installed torch; None: built without CUDA, or without HIP."""

    version: str
    cuda: str | None
    hip: str | None


def unfit_engines(vendor: str) -> dict[str, UnfitEngine]:
    """Why installed engines can't use this vendor's GPUs, by engine.

    Engines that can, or that are not installed, are left out. vendor: NVIDIA or AMD; '': no GPU.
    """
    if not vendor:
        return {}
    unfit = {"torch": _unfit_torch(vendor), "jax": _unfit_jax(vendor)}
    return {engine: why for engine, why in unfit.items() if why}


def torch_build() -> TorchBuild | None:
    """The build of the installed torch. None: torch is not installed, or its file does not say."""
    spec = find_spec("torch")
    values = _assigned(Path(spec.origin).with_name("version.py")) if spec and spec.origin else {}
    if "__version__" not in values or "cuda" not in values:
        return None
    return TorchBuild(str(values["__version__"]), values["cuda"], values.get("hip"))


def jax_plugins() -> list[str] | None:
    """The names of jax's installed plugins for devices; None: jax is not installed."""
    if find_spec("jax") is None:
        return None
    names = [point.name for point in metadata.entry_points(group="jax_plugins")]
    package = find_spec("jax_plugins")
    places = package.submodule_search_locations if package else None
    return names + [module.name for module in pkgutil.iter_modules(places or [])]


def _unfit_torch(vendor: str) -> UnfitEngine | None:
    build = torch_build()
    if build is None or (build.cuda if vendor == NVIDIA else build.hip):
        return None
    cause = f"the installed torch {build.version} is built without {_PLATFORM[vendor]}"
    if vendor == AMD:
        return UnfitEngine(
            cause,
            "install torch's build for ROCm: PyTorch's page \"Start Locally\" prints the command",
        )
    if installed_by_conda("torch"):
        return UnfitEngine(cause, "install conda's CUDA build of pytorch in this environment")
    package = f"torch=={build.version.partition('+')[0]}"
    commands = f"{pip_command('uninstall', 'torch')} && {pip_command('install', package)}"
    return UnfitEngine(cause, f"{commands} puts the CUDA build in its place")


def _unfit_jax(vendor: str) -> UnfitEngine | None:
    plugins = jax_plugins()
    word = _PLATFORM[vendor].lower()
    if plugins is None or any(word in name for name in plugins):
        return None
    cause = f"the installed jax has no plugin for {_PLATFORM[vendor]}"
    if vendor == AMD:
        return UnfitEngine(cause, "jax's plugin for ROCm, as its own installation page has it")
    package = f"jax[{_JAX_EXTRA}]=={metadata.version('jax')}"
    return UnfitEngine(cause, f"{pip_command('install', package)} adds it")


def _assigned(file: Path) -> dict[str, str | None]:
    """Names of a Python file with the text or None assigned to them. {}: it can't be read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    values: dict[str, str | None] = {}
    for node in tree.body:
        targets: list[ast.expr]
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        else:
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str | None):
            text = node.value.value
            values |= {target.id: text for target in targets if isinstance(target, ast.Name)}
    return values
