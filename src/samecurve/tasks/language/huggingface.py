"""The decoder as Hugging Face's libraries have it: Llama's names, config and tokenizer files, in
both directions. No engine is imported here.

The arithmetic is Llama's own: rotary halves, no biases, so that names and a config are all that
passes.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from samecurve.errors import UserError
from samecurve.tasks.language.sections import LanguageModel

_BODY = "model."
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_COMPUTED = "rotary_emb.inv_freq"  # older files have these, which follow from rope_theta
_CONTENT = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def theirs(name: str) -> str:
    """A parameter's name there."""
    return name if name == _HEAD else _BODY + name


def renamed(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Under their names."""
    return {theirs(name): tensor for name, tensor in tensors.items()}


def ours(names: Iterable[str]) -> dict[str, str]:
    """Their names -> ours, if all of them are theirs; nothing else changes.

    What is computed there has none.
    """
    given = [name for name in names if not name.endswith(_COMPUTED)]
    if not all(name == _HEAD or name.startswith(_BODY) for name in given):
        return {name: name for name in given}
    return {name: name.removeprefix(_BODY) for name in given}


def config_of(fields: LanguageModel, vocab: int, dtype: str) -> dict[str, Any]:
    """config.json. rope_theta twice: as transformers 4 and 5 look for it."""
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


def generation_of() -> dict[str, Any]:
    """generation_config.json: as `samecurve sample` draws."""
    return {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def fields_in(path: Path) -> dict[str, Any]:
    """What a config.json says of the model, as our `model` section has it.

    UserError: a model that this decoder is not.
    """
    try:
        found = json.loads(path.read_text())
        heads = found["num_attention_heads"]
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
        said = {
            "hidden_size": found["hidden_size"],
            "num_layers": found["num_hidden_layers"],
            "num_heads": heads,
            "kv_heads": found.get("num_key_value_heads") or heads,
            "rope_theta": float(rope.get("rope_theta") or found.get("rope_theta") or 10000.0),
            "norm_eps": found.get("rms_norm_eps", 1e-6),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} can't be read as a model's config: {type(error).__name__}: {error}",
            "a directory as the Hugging Face libraries write it, or the weights' own file",
            "--init-from",
        ) from None
    other = {
        f"model_type {found.get('model_type')}": found.get("model_type") != "llama",
        f"rope {rope.get('rope_type', rope.get('type'))}": (
            rope.get("rope_type", rope.get("type", "default")) != "default"
        ),
        f"hidden_act {found.get('hidden_act')}": (
            found.get("hidden_act", "silu") not in {"silu", "swish"}
        ),
        "biases": bool(found.get("attention_bias") or found.get("mlp_bias")),
    }
    if any(other.values()):
        raise UserError(
            f"{path}: {', '.join(what for what, is_so in other.items() if is_so)}: not what this"
            " decoder computes",
            "weights of a plain Llama (silu, default rope, no biases)",
            "--init-from",
        )
    return said


def write_config(fields: LanguageModel, vocab: int, dtype: str, to: Path) -> None:
    """config.json and generation_config.json."""
    (to / "config.json").write_text(json.dumps(config_of(fields, vocab, dtype), indent=1) + "\n")
    (to / "generation_config.json").write_text(json.dumps(generation_of(), indent=1) + "\n")


def write_tokenizer(source: Path | None, to: Path, context: int) -> list[str]:
    """tokenizer.json and what AutoTokenizer reads beside it.

    source: a tokenizer.json; None: bytes. Returns what the user should know.
    """
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(source)) if source else _bytes()
    made.no_truncation()  # as in training
    made.no_padding()
    made.save(str(to / "tokenizer.json"))
    (to / "tokenizer_config.json").write_text(
        json.dumps({**_CONTENT, "model_max_length": context}, indent=1) + "\n"
    )
    return (
        [
            "this tokenizer adds special tokens of its own accord, and training had none: encode"
            " with add_special_tokens=False"
        ]
        if made.encode("a").ids != made.encode("a", add_special_tokens=False).ids
        else []
    )


def _bytes() -> Any:
    """Bytes as a tokenizer of the library: byte n is token n."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(
        models.BPE(
            vocab={character: byte for byte, character in enumerate(_characters())}, merges=[]
        )
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def _characters() -> list[str]:
    """What stands for each byte in a byte-level vocabulary: itself if it prints, else the next
    character from 256 on. Source: Radford et al. 2019, GPT-2's vocabulary.
    """
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(byte) if byte in prints else chr(256 + others.index(byte)) for byte in range(256)]


def unlike(mine: LanguageModel, said: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Fields that no array's shape shows, and that differ: those that make weights meaningless, and
    those that only change what is computed with them.
    """
    if "config.json" in said:
        said = fields_in(said["config.json"])
    elif "kv_heads" in said:
        said = {**said, "kv_heads": said["kv_heads"] or said.get("num_heads")}
    here = {
        "num_heads": mine.num_heads,
        "kv_heads": mine.groups,
        "rope_theta": mine.rope_theta,
        "norm_eps": mine.norm_eps,
    }
    differ = [
        name
        for name, value in here.items()
        if name in said and said[name] is not None and said[name] != value
    ]
    shown = {name: f"{name} {said[name]}, here {here[name]}" for name in differ}
    return [shown[name] for name in differ if name.endswith("heads")], [
        shown[name] for name in differ if not name.endswith("heads")
    ]
