"""The huggingface task with PyTorch: the library's own model under every strategy."""

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.tasks.huggingface.attention import choose_attention
from samecurve.tasks.huggingface.balance import BatchBalanced, make_causal
from samecurve.tasks.huggingface.causal import with_loss_head
from samecurve.tasks.huggingface.data_section import HFData
from samecurve.tasks.huggingface.library import (
    has_plain_head,
    longest_sequence,
    model_class,
    read_config,
)
from samecurve.tasks.huggingface.recurrent import is_recurrent, keep_float64, kernel_note
from samecurve.tasks.huggingface.sections import HFModel
from samecurve.tasks.huggingface.task import HuggingFaceTask


class TorchHuggingFace(HuggingFaceTask):
    """The objective gives loss() and metrics(), or features() and batch_loss()."""

    def __init__(
        self, model: HFModel, data: HFData, cache: Path, assets: Path | None = None
    ) -> None:
        super().__init__(model, data, cache, assets)
        self.config = read_config(model, assets)
        self._class = model_class(self.config)
        self._attention, self._attention_reason = choose_attention(
            model.attention, self._class, has_gpu=torch.cuda.is_available()
        )
        _check_length(self.config, data)
        self._take_objective()

    def _take_objective(self) -> None:
        """Its methods are this task's own."""
        objective, self._balance = make_causal(self.fields, self.config, packed=self.packed)
        self.metric_names = objective.metric_names
        self.metrics = objective.metrics
        if isinstance(objective, BatchBalanced):
            self.features, self.batch_loss = objective.features, objective.batch_loss
        else:
            self.loss = objective.loss

    @cached_property
    def vocab_size(self) -> int:
        size: int = self.config.vocab_size
        return size

    def model(self) -> nn.Module:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        built = self._class._from_config(  # noqa: SLF001 - what AutoModel.from_config calls
            self.config, dtype=torch.float32, attn_implementation=self._attention
        )
        # else in the first forward pass, before which a trial would put the model back
        maybe_install_capturing_hooks(built.base_model)
        if is_recurrent(built):
            self._check_packing()
            keep_float64(built)
        elif _has_fusible_head(built):
            with_loss_head(built)
        module: nn.Module = built
        return module

    def init_module(self, model: Any, module: nn.Module) -> None:
        """The library's own first values."""
        model._init_weights(module)  # noqa: SLF001 - the library's name for it

    def facts(self) -> Mapping[str, Any]:
        library = f"{self._class.__name__} of transformers {version('transformers')}"
        attention = f"attention {self._attention}: {self._attention_reason}"
        notes = [f"{library}; {attention}"]
        if self._balance:
            notes.append(self._balance)
        with torch.device("meta"):
            if is_recurrent(self.model()):
                notes.append(kernel_note())
        return {"tokens_per_sample": self.data.seq_len, "notes": tuple(notes)}

    def _check_packing(self) -> None:
        """UserError: a recurrent model would carry its state from one document into the next."""
        if self.packed:
            raise UserError(
                f"data.packing: {self._class.__name__} carries a state from token to token, and the"
                " library's path through torch can't begin anew within a row: a document would see"
                " the one before it",
                "--set data.packing=false: a document a row, padded to the longest of its"
                " microbatch",
                "data.packing",
            )


def _has_fusible_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    plain = type(head) is nn.Linear and head.bias is None
    return plain and has_plain_head(type(model).forward)


def _check_length(config: Any, data: HFData) -> None:
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
