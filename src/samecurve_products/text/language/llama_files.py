"""The decoder in Hugging Face's format for Llama: parameter names and config files, both ways.

The decoder's arithmetic is Llama's own (rotary halves, no biases), so a conversion renames the
parameters and writes a config; it changes no value. No engine is imported here.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from samecurve.seam import UserError
from samecurve_products.text.language import LanguageModel

_BODY = "model."
_HEAD = "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"  # older files have these, which follow from rope_theta


def hf_name(name: str) -> str:
    """The name of a parameter in Llama's files."""
    return name if name == _HEAD else _BODY + name


def names_from_hf(names: Iterable[str]) -> dict[str, str]:
    """Map the library's parameter names to ours, if all names are the library's.

    Buffers that the library computes from the config have no name here.
    """
    stored = [name for name in names if not name.endswith(_COMPUTED)]
    if not all(name == _HEAD or name.startswith(_BODY) for name in stored):
        return {name: name for name in stored}
    return {name: name.removeprefix(_BODY) for name in stored}


def make_hf_config(fields: LanguageModel, vocab: int, dtype: str) -> dict[str, Any]:
    """The content of config.json. rope_theta stands twice: for transformers 4 and for 5."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": vocab,
        "hidden_size": fields.hidden_size,
        "intermediate_size": fields.inner,
        "num_hidden_layers": fields.num_layers,
        "num_attention_heads": fields.num_heads,
        "num_key_value_heads": fields.groups,
        "head_dim": fields.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": fields.max_seq_len,
        "rms_norm_eps": fields.norm_eps,
        "rope_theta": fields.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.rope_theta},
        "tie_word_embeddings": fields.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }


# the content of generation_config.json: the settings that `samecurve sample` draws with
_GENERATION = {
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def read_hf_config(path: Path) -> dict[str, Any]:
    """Read a config.json as fields of our `model` section.

    UserError: the config describes a model that computes something else than our decoder.
    """
    try:
        config = json.loads(path.read_text())
        heads = config["num_attention_heads"]
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        fields = {
            "hidden_size": config["hidden_size"],
            "num_layers": config["num_hidden_layers"],
            "num_heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            "norm_eps": config.get("rms_norm_eps", 1e-6),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} can't be read as a model's config: {type(error).__name__}: {error}",
            "a directory as the Hugging Face libraries write it, or the weights' own file",
            "--init-from",
        ) from None
    differences = []
    if config.get("model_type") != "llama":
        differences.append(f"model_type {config.get('model_type')}")
    if rope_type != "default":
        differences.append(f"rope {rope_type}")
    if config.get("hidden_act", "silu") not in {"silu", "swish"}:
        differences.append(f"hidden_act {config['hidden_act']}")
    if config.get("attention_bias") or config.get("mlp_bias"):
        differences.append("biases")
    if differences:
        raise UserError(
            f"{path}: {', '.join(differences)}: not what this decoder computes",
            "weights of a plain Llama (silu, default rope, no biases)",
            "--init-from",
        )
    return fields


def write_config(fields: LanguageModel, vocab: int, dtype: str, to: Path) -> None:
    """Write config.json and generation_config.json."""
    config = make_hf_config(fields, vocab, dtype)
    for name, content in (("config.json", config), ("generation_config.json", _GENERATION)):
        (to / name).write_text(json.dumps(content, indent=1) + "\n")


def compare_with_hf(
    model: LanguageModel, foreign: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Fields that differ between two models, although the shapes of their arrays do not show it.

    Returns two lists: differences that make the weights meaningless, and differences that only
    change what is computed with them.
    """
    if "config.json" in foreign:
        foreign = read_hf_config(foreign["config.json"])
    elif "kv_heads" in foreign:
        foreign = {**foreign, "kv_heads": foreign["kv_heads"] or foreign.get("num_heads")}
    here = {
        "num_heads": model.num_heads,
        "kv_heads": model.groups,
        "rope_theta": model.rope_theta,
        "norm_eps": model.norm_eps,
    }
    fatal: list[str] = []
    differing: list[str] = []
    for name, value in here.items():
        there = foreign.get(name)
        if there is None or there == value:
            continue
        group = fatal if name.endswith("heads") else differing
        group.append(f"{name} {there}, here {value}")
    return fatal, differing
