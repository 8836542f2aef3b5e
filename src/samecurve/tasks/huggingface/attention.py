"""Which of the library's attention implementations a model takes, and why."""

from importlib.util import find_spec
from typing import Any

from samecurve.core.system.installation import install_command
from samecurve.errors import UserError
from samecurve.tasks.huggingface.sections import Attention

_LIBRARY_NAMES = {"flash": "flash_attention_2", "flex": "flex_attention"}
_SUPPORT = {
    "sdpa": "_supports_sdpa",
    "flash": "_supports_flash_attn",
    "flex": "_supports_flex_attn",
}


def choose_attention(wanted: Attention, model_class: Any, *, has_gpu: bool) -> tuple[str, str]:
    """(the library's name of it, the reason).

    UserError: the model, the machine or the installation has it not.
    """
    supported = [name for name, flag in _SUPPORT.items() if getattr(model_class, flag, False)]
    if wanted == "auto":
        return _automatic(supported, model_class)
    if wanted in _SUPPORT and wanted not in supported:
        raise UserError(
            f"model.attention {wanted}: {model_class.__name__} of the installed transformers has"
            " it not",
            f"model.attention: {' or '.join(['auto', *supported, 'eager'])}",
            "model.attention",
        )
    if wanted == "flash" and find_spec("flash_attn") is None:
        raise UserError(
            "model.attention flash: flash_attn is not installed",
            f"{install_command('hf')} has it not: install flash-attn as its authors say; or"
            " model.attention: sdpa",
            "model.attention",
        )
    if wanted in _LIBRARY_NAMES and not has_gpu:
        raise UserError(
            f"model.attention {wanted}: there is no GPU here, and on a CPU it has no backward pass",
            "model.attention: auto",
            "model.attention",
        )
    return _LIBRARY_NAMES.get(wanted, wanted), "model.attention"


def _automatic(supported: list[str], model_class: Any) -> tuple[str, str]:
    if "sdpa" not in supported:
        return "eager", f"{model_class.__name__} has no sdpa"
    reason = "torch's fused kernels, on any device"
    if "flash" in supported and find_spec("flash_attn") is not None:
        reason += "; flash-attn is installed: model.attention=flash takes it, on GPUs in bf16"
    return "sdpa", reason
