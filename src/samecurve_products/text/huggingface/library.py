"""The transformers config, class and attention that the `model` section stands for.

The library is imported late, because its import takes two seconds.
"""

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.core.config import MOST_LAYERS
from samecurve.seam import UserError, install_command, suggest
from samecurve_products.text.huggingface.model_directory import CONFIG, WRITTEN, check_directory
from samecurve_products.text.huggingface.sections import Attention, HFModel, Objective

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_KINDS = {
    "causal": "causal language model",
    "classify": "classifier of texts",
    "masked": "masked language model",
    "embed": "encoder",
}
_USUAL = {
    "causal": ["llama", "qwen3", "mistral", "gpt2"],
    "classify": ["bert", "modernbert", "llama", "qwen3"],
    "masked": ["bert", "roberta", "modernbert", "distilbert"],
    "embed": ["bert", "modernbert", "qwen3", "llama"],
}
_MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "embed": "MODEL_MAPPING",
    "classify": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
_LAYERS = re.compile(r"^(num(_hidden|_encoder|_decoder)?_layers|n_layers?)$")
_SIZES = re.compile(
    r"^(hidden_size|intermediate_size|vocab_size|num_attention_heads|num_key_value_heads|head_dim"
    r"|n_embd|n_heads?|d_model|max_position_embeddings|n_positions)$"
)
_ATTENTION_NAMES = {"flash": "flash_attention_2", "flex": "flex_attention"}
_ATTENTION_SUPPORT = {
    "sdpa": "_supports_sdpa",
    "flash": "_supports_flash_attn",
    "flex": "_supports_flex_attn",
}


def read_config(
    fields: HFModel, assets: Path | None = None, *, vocab_size: int | None = None
) -> "PretrainedConfig":
    """The library's config of a model.

    assets: the files that a run has kept, used in place of the directory
    vocab_size: of a model that is made from its fields, where they have none

    UserError: no such directory, architecture or field, or values that don't fit each other.
    """
    _import_library()
    if assets is not None and (assets / CONFIG).is_file():
        return _config_of(assets, {}, fields.objective)
    home = fields.directory
    if home is not None:
        return _config_of(home, fields.config_fields, fields.objective)
    assert fields.architecture is not None
    values = dict(fields.config_fields)
    if vocab_size is not None:
        values.setdefault("vocab_size", vocab_size)
    return _config_of_architecture(fields.architecture, values, fields.objective)


def model_class(config: "PretrainedConfig", objective: Objective) -> Any:
    """The library's class of a model for this objective. UserError: there is none."""
    classes = _classes(objective)
    if type(config) not in classes:
        raise UserError(
            f"the installed transformers has no {_KINDS[objective]} of type {config.model_type}",
            _near_architectures(config.model_type, objective),
            "model.architecture",
        )
    return classes[type(config)]


def longest_sequence(config: "PretrainedConfig") -> int | None:
    """The most tokens that a row may have; None: the model has no limit."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    return limit


def has_plain_head(forward: Any) -> bool:
    """Whether the model's forward pass returns its logits unchanged."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return False
    changes = re.findall(r"^ +logits(?:\[.*\])? [*/+-]?= (.*)$", source, re.MULTILINE)
    return (
        len(changes) == 1 and re.fullmatch(r"self\.lm_head\([\w\[\]:, ]+\)", changes[0]) is not None
    )


def choose_attention(wanted: Attention, model_class: Any, *, has_gpu: bool) -> tuple[str, str]:
    """The library's name of the attention to use, and the reason.

    UserError: the model, the machine or the installation does not have it.
    """
    flags = _ATTENTION_SUPPORT.items()
    supported = [name for name, flag in flags if getattr(model_class, flag, False)]
    if wanted == "auto":
        return _automatic_attention(supported, model_class)
    if wanted in _ATTENTION_SUPPORT and wanted not in supported:
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
    if wanted in _ATTENTION_NAMES and not has_gpu:
        raise UserError(
            f"model.attention {wanted}: there is no GPU here, and on a CPU it has no backward pass",
            "model.attention: auto",
            "model.attention",
        )
    return _ATTENTION_NAMES.get(wanted, wanted), "model.attention"


def _automatic_attention(supported: list[str], model_class: Any) -> tuple[str, str]:
    if "sdpa" not in supported:
        return "eager", f"{model_class.__name__} has no sdpa"
    reason = "torch's fused kernels, on any device"
    if "flash" in supported and find_spec("flash_attn") is not None:
        reason += "; flash-attn is installed: model.attention=flash takes it, on GPUs in bf16"
    return "sdpa", reason


def _import_library() -> None:
    """Import transformers and silence its log lines and bars, which each rank would print."""
    try:
        logging: Any = importlib.import_module("transformers.utils.logging")
    except ImportError as error:
        raise UserError(
            f"task huggingface needs transformers: {error}", install_command("hf"), "task"
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _config_of_architecture(
    name: str, values: Mapping[str, Any], objective: Objective
) -> "PretrainedConfig":
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING or name not in _architectures(objective):
        raise UserError(
            f"model.architecture {name}: the installed transformers has no such"
            f" {_KINDS[objective]}",
            _near_architectures(name, objective),
            "model.architecture",
        )
    config_class = CONFIG_MAPPING[name]
    _check_fields(config_class, values, f"{name}'s config", objective)
    _check_numbers(values, "model.", "model")
    return _built(lambda: config_class(**values), f"model.architecture {name}")


def _config_of(
    directory: Path, values: Mapping[str, Any], objective: Objective
) -> "PretrainedConfig":
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file = directory / CONFIG
    check_directory(directory)
    if not file.is_file():
        raise UserError(f"{directory} has no {CONFIG}", WRITTEN, "model.path")
    try:
        written = json.loads(file.read_text())
        kind = str(written["model_type"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} is no model's config: {type(error).__name__}: {error}",
            "a directory as save_pretrained() writes it",
            "model.path",
        ) from None
    if kind not in CONFIG_MAPPING:
        raise UserError(
            f"{file}: the installed transformers knows no model_type {kind}, and code that lies"
            " beside a config is not run",
            f"{_near_architectures(kind, objective)}; or a newer transformers",
            "model.path",
        )
    _check_fields(CONFIG_MAPPING[kind], values, f"{kind}'s config", objective)
    _check_numbers(written, f"{file}: ", "model.path")
    _check_numbers(values, "model.", "model")
    return _built(
        lambda: AutoConfig.from_pretrained(directory, local_files_only=True, **values), str(file)
    )


def _built(build: Any, what: str) -> "PretrainedConfig":
    """UserError: the library refuses the values."""
    config: PretrainedConfig = accepted_by_library(build, what)
    _check_rope(config, what)
    return config


def accepted_by_library(build: Callable[[], Any], what: str) -> Any:
    """What the library builds, a config or a model. UserError: it refuses the values."""
    try:
        return build()
    except Exception as error:  # the library raises many kinds
        reasons = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = reasons[-1] if reasons else type(error).__name__
        if isinstance(error, KeyError | IndexError | AttributeError):  # its text is a name alone
            reason = f"{type(error).__name__}: {reason}"
        raise UserError(
            f"{what}: {reason}",
            "values that fit each other, as the library's documentation of this config has them",
            "model",
        ) from None


def _check_rope(config: "PretrainedConfig", what: str) -> None:
    """UserError: the library has no such form of rotary positions."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            _check_rope(part, f"{what}: {name}")
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    by_layer = [value for value in rope.values() if isinstance(value, dict)]
    usual = getattr(config, "default_rope_type", "default")  # axial of a part that sees pictures
    known = list(dict.fromkeys([usual, "default", *ROPE_INIT_FUNCTIONS]))
    for parameters in by_layer or [rope]:
        kind = parameters.get("rope_type", usual)
        if kind not in known:
            raise UserError(
                f"{what}: the installed transformers knows no rope_type {kind} (rope_parameters, or"
                " rope_scaling of an older config)",
                f"one of {', '.join(known)}, as the model was made; or a newer transformers",
                "model",
            )


def _check_fields(
    config_class: Any, values: Mapping[str, Any], what: str, objective: Objective
) -> None:
    """UserError: the config's class has no such field."""
    known = {field.name for field in dataclasses.fields(config_class)}
    known |= set(config_class.attribute_map) | _read_fields(config_class, objective)
    ours = set(HFModel.model_fields)
    for name in values:
        if name not in known:
            raise UserError(
                f"model.{name}: neither this program nor {what} has such a field",
                suggest(name, sorted(known | ours)) or f"it has {', '.join(sorted(known))}",
                f"model.{name}",
            )


def _check_numbers(values: Mapping[str, Any], before: str, place: str) -> None:
    """UserError: a size is below 1, or layers are more than a model can have.

    The library would build the one without an end, and fail in the other somewhere else.
    """
    for name, value in values.items():
        if isinstance(value, dict):  # the config of a part of the model
            _check_numbers(value, f"{before}{name}.", place)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        is_count = _LAYERS.search(name) is not None
        if (is_count or _SIZES.search(name)) and value < 1:
            raise UserError(
                f"{before}{name} is {value}", "a number from 1 on, as the model was made", place
            )
        if is_count and value > MOST_LAYERS:
            raise UserError(
                f"{before}{name} is {value}; a model here has {MOST_LAYERS} at most",
                "the number of layers that the model was made with",
                place,
            )


def _read_fields(config_class: Any, objective: Objective) -> set[str]:
    """Names that the model's code reads from its config, but that are no fields (head_dim)."""
    classes = _classes(objective)
    if config_class not in classes:
        return set()
    module = importlib.import_module(classes[config_class].__module__)
    source = inspect.getsource(module)
    return set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source))


def _near_architectures(name: str, objective: Objective) -> str:
    known = sorted(_architectures(objective))
    begins = [other for other in known if other[:3] == name[:3]]
    usual = ", ".join(begins or _USUAL[objective])
    if name in _architectures("causal"):  # the model exists, but not with this head
        return f"one that has it, such as {usual}; or model.objective: causal"
    return suggest(name, known) or f"such as {usual}"


def _classes(objective: Objective) -> Mapping[Any, Any]:
    """Model classes by the class of their config."""
    from transformers.models.auto import modeling_auto

    classes: Mapping[Any, Any] = getattr(modeling_auto, _MAPPINGS[objective])
    return classes


def _architectures(objective: Objective) -> Collection[str]:
    from transformers.models.auto import modeling_auto

    names: Collection[str] = getattr(modeling_auto, f"{_MAPPINGS[objective]}_NAMES")
    return names
