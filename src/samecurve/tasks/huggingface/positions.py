"""How many positions a model knows, held against the rows' length."""

from typing import Any

from torch import nn

from samecurve.errors import UserError
from samecurve.tasks.huggingface.data_section import HFData
from samecurve.tasks.huggingface.library import longest_sequence


def check_positions(model: nn.Module, seq_len: int) -> None:
    """UserError: of learned positions that begin after padding's (roberta), too few are left."""
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


def check_length(config: Any, data: HFData) -> None:
    """UserError: rows are longer than the model knows positions."""
    limit = longest_sequence(config)
    if limit is not None and data.seq_len > limit:
        raise UserError(
            f"data.seq_len is {data.seq_len}; this model knows {limit} positions"
            " (max_position_embeddings)",
            f"--seq-len {limit}, or --set model.max_position_embeddings={data.seq_len} where its"
            " positions are computed (rotary), not learned",
            "data.seq_len",
        )
