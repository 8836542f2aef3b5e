"""Checks that a model can take the data: positions, vocabulary, rows of several documents."""

from importlib.util import find_spec
from typing import Any

from torch import nn

from samecurve.seam import UserError
from samecurve_products.text.huggingface.library import longest_sequence
from samecurve_products.text.huggingface.sections import HFData
from samecurve_products.text.huggingface.task import HuggingFaceTask


def check_length(config: Any, data: HFData) -> None:
    """UserError: rows have more tokens than the model has positions."""
    limit = longest_sequence(config)
    if limit is not None and data.seq_len > limit:
        raise UserError(
            f"data.seq_len is {data.seq_len}; this model knows {limit} positions"
            " (max_position_embeddings)",
            f"--seq-len {limit}, or --set model.max_position_embeddings={data.seq_len} where its"
            " positions are computed (rotary), not learned",
            "data.seq_len",
        )


def check_positions(model: nn.Module, seq_len: int) -> None:
    """UserError: a model whose positions begin after that of padding (roberta) has too few."""
    for name, module in model.named_modules():
        if not name.endswith("position_embeddings") or not isinstance(module, nn.Embedding):
            continue
        skipped = 0 if module.padding_idx is None else module.padding_idx + 1
        if seq_len > module.num_embeddings - skipped:
            raise UserError(
                f"data.seq_len is {seq_len}; this model knows {module.num_embeddings} positions, of"
                f" which {skipped} are not used (up to that of padding)",
                f"--seq-len {module.num_embeddings - skipped}; or, of a model with random weights,"
                f" --set model.max_position_embeddings={seq_len + skipped}",
                "data.seq_len",
            )


def check_vocabulary_is_known(task: HuggingFaceTask) -> None:
    """UserError: the data has ids alone, and nothing says how large their vocabulary is."""
    fields = task.fields
    has_size = fields.path or "vocab_size" in fields.config_fields
    if task.prepared.tokenizer is None and not has_size:
        raise UserError(
            f"{task.data.sources[0].source} holds raw tokens; their vocabulary is not known",
            "--set model.vocab_size=N, or --set data.tokenizer=PATH of their tokenizer",
            "model.vocab_size",
        )


def check_vocabulary(task: HuggingFaceTask, size: int, known: int) -> None:
    """UserError: the data, or its tokenizer, has tokens that the model does not know.

    size: of the tokenizer's vocabulary; known: of the model's.
    """
    prepared, path = task.prepared, task.fields.path
    if max(size, prepared.largest_id + 1) <= known:
        return
    if prepared.largest_at and prepared.largest_id >= known:
        raise UserError(
            f"{prepared.largest_at} has the id {prepared.largest_id}; the model knows {known}"
            " tokens",
            "the model that these ids were made for, with model.vocab_size above them; or"
            f" data.token_dtype, if they are not {task.data.token_dtype}",
            "data.source",
        )
    assert prepared.tokenizer is not None
    remedy = f"of a model with random weights, --set model.vocab_size={size}"
    if path is not None and task.data.tokenizer is not None:
        remedy = "the model's own tokenizer: leave data.tokenizer out"
    elif path is not None:
        remedy = (
            "tokens were added to this tokenizer, and none to the model beside it: give it rows"
            f" for them (its resize_token_embeddings({size}), save_pretrained()), or take the"
            " tokenizer as it was"
        )
    raise UserError(
        f"the model knows {known} tokens; the tokenizer {prepared.tokenizer.notes.name} has {size}",
        remedy,
        "data.tokenizer" if task.data.tokenizer else "model.path",
    )


def is_recurrent(model: nn.Module) -> bool:
    """Whether the model carries a state from token to token, beside attention.

    State-space layers, linear attention and convolutions do. The library's path through torch
    can't begin their state anew within a row.
    """
    config: Any = model.config
    kinds = getattr(config, "layer_types", None) or []
    return (
        bool(getattr(model, "_is_stateful", False))
        or any(isinstance(module, nn.Conv1d) for module in model.modules())
        or any("attention" not in kind or "linear" in kind for kind in kinds)
    )


def check_packing(model: nn.Module, name: str) -> None:
    """UserError: the model is recurrent, and rows hold several documents. name: of its class."""
    if is_recurrent(model):
        raise UserError(
            f"data.packing: {name} carries a state from token to token, and the library's path"
            " through torch can't begin anew within a row: a document would see the one before it",
            "--set data.packing=false: a document a row, padded to the longest of its microbatch",
            "data.packing",
        )


def recurrent_kernels() -> str:
    """A note for the user: the kernels that state-space layers use on this machine."""
    if find_spec("mamba_ssm") is not None:
        return "state-space layers by mamba_ssm, where they are on a GPU"
    return "state-space layers by the library's own path through torch, as mamba_ssm is absent"
