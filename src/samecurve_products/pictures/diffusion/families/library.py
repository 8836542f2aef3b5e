"""diffusers and transformers: imported late and silenced, their classes found by name."""

import importlib
from typing import Any

from samecurve.seam import UserError, install_command
from samecurve.units import first_and_count
from samecurve_products.lora import quantized
from samecurve_products.pictures.diffusion.families.opened import WHERE, Component, OpenedPipeline

_MODELS = {"diffusers": "ModelMixin", "transformers": "PreTrainedModel"}


def library(name: str) -> Any:
    """diffusers or transformers, silenced: each rank would print their lines and bars.

    UserError: it is not installed.
    """
    if quantized.is_installed():
        quantized.import_library()  # diffusers would import it, and let it fetch code
    try:
        for each in ("transformers", "diffusers"):  # the second imports the first
            logging: Any = importlib.import_module(f"{each}.utils.logging")
            logging.set_verbosity_error()
            logging.disable_progress_bar()
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"task diffusion needs diffusers and transformers: {error}",
            install_command("diffusion"),
            "task",
        ) from None


def class_of(opened: OpenedPipeline, component: Component, base: str = "") -> Any:
    """The library's class of a component. UserError: the installed library has none of this name.

    base: the class of the library that it must be derived from
    """
    module = library(component.library)
    found = getattr(module, component.class_name, None)
    needed = getattr(module, base or _MODELS[component.library])
    if not (isinstance(found, type) and issubclass(found, needed)):
        raise UserError(
            f"{opened.place}: the installed {component.library} {module.__version__} has no"
            f" {component.class_name}",
            f"pip install --upgrade {component.library}",
            WHERE,
        )
    return found


def check_loaded(opened: OpenedPipeline, what: str, missing: Any, other: Any = ()) -> None:
    """UserError: arrays are missing, or have another shape than the config says."""
    for names, problem in ((missing, "lack"), (other, "have in another shape")):
        if names:
            raise UserError(
                f"{opened.place}: the files of {what} {problem} {first_and_count(sorted(names))}",
                "are the files those of the config beside them? get them again",
                WHERE,
            )
