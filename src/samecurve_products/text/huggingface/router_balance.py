"""The auxiliary loss of a mixture of experts, over the whole batch or over each row.

With E experts and the N tokens of all layers, f_e counts how often expert e is chosen, p_e sums
its probabilities, and the loss is E * sum_e (f_e / N) * (p_e / N). Source: Fedus et al. 2021,
arXiv:2101.03961, equations 4 to 6, as the library computes it (all layers together). The loss
is a product of means over the batch, so it is computed once, from the sums over all devices.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samecurve.seam import Arrays, Mean, UserError
from samecurve.torch_engine.model.cross_entropy import IGNORED
from samecurve_products.text.huggingface.causal import Causal, next_labels, token_errors
from samecurve_products.text.huggingface.sections import HFModel

_COEFFICIENT = "router_aux_loss_coef"


class RowBalanced(Causal):
    """A causal objective with an auxiliary loss for each row: an ordinary mean over rows."""

    def __init__(self, *, packed: bool, coefficient: float, chosen: int) -> None:
        super().__init__(packed=packed)
        self._coefficient, self._chosen = coefficient, chosen

    def loss(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:  # type: ignore[override]
        rows = self._rows(model, batch)
        counts = rows["counted"]
        each = _balance(rows["chosen"], rows["chances"], rows["routed"])
        balance = (each * counts).sum()
        return self._means(rows["error"].sum(), balance, counts.sum())

    def _means(self, error: Tensor, balance: Tensor, count: Tensor) -> Mapping[str, Mean]:
        """The means of a batch. balance: already weighted by the count."""
        return {
            "loss": Mean(error + self._coefficient * balance, count),
            "cross_entropy": Mean(error, count),
            "balance": Mean(balance, count),
        }

    def _rows(self, model: Any, batch: Arrays) -> dict[str, Tensor]:
        """Sums for each row: error, counted and routed tokens [rows]; and for each expert how
        often it was chosen and its summed probabilities [rows, experts].
        """
        output = self.call(model, batch, output_router_logits=True)
        labels = next_labels(batch)
        real = batch["documents"] > 0
        chosen, chances = [], []
        for logits in output.router_logits:
            of_tokens = F.softmax(logits, -1).view(*real.shape, -1)
            best = of_tokens.topk(self._chosen, -1).indices
            hits = F.one_hot(best, of_tokens.shape[-1]).sum(2) * real[..., None]
            chosen.append(hits.sum(1))
            chances.append((of_tokens * real[..., None]).sum(1))
        error = token_errors(output.logits, labels).sum(1)
        layers = len(chosen)
        return {
            "error": error,
            "counted": (labels != IGNORED).sum(1).to(error.dtype),
            "routed": layers * real.sum(1).to(error.dtype),
            "chosen": torch.stack(chosen).sum(0).to(error.dtype),
            "chances": torch.stack(chances).sum(0).to(error.dtype),
        }


class BatchBalanced(RowBalanced):
    """A causal objective with one auxiliary loss for the whole batch, on any devices."""

    metric_names = ("cross_entropy", "accuracy")

    def features(self, model: Any, batch: Arrays) -> dict[str, Tensor]:
        return self._rows(model, batch)

    def batch_loss(self, features: Mapping[str, Tensor]) -> Mapping[str, Mean]:
        sums = {name: column.sum(0) for name, column in features.items()}
        balance = _balance(sums["chosen"], sums["chances"], sums["routed"])
        return self._means(sums["error"], balance * sums["counted"], sums["counted"])

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        totals = super().metrics(model, batch)
        return {"cross_entropy": totals["loss"], "accuracy": totals["accuracy"]}


def make_causal(fields: HFModel, config: Any, *, packed: bool) -> tuple[Causal, str]:
    """The causal objective, and a line about its router balance ('': nothing to say).

    UserError: a balance is asked of a model that has no auxiliary loss.
    """
    experts, chosen = _num_experts(config), int(getattr(config, "num_experts_per_tok", 0) or 0)
    if experts and chosen > experts:
        raise UserError(
            f"num_experts_per_tok: {chosen} experts a token, of {experts}",
            f"--set model.num_experts_per_tok=N, at most {experts}",
            "model.num_experts_per_tok",
        )
    if not hasattr(config, _COEFFICIENT):
        if fields.balance in {"batch", "sequence"}:
            raise UserError(
                f"model.balance {fields.balance}: {config.model_type} has no auxiliary loss in the"
                " library",
                "leave it out, or model.balance: none",
                "model.balance",
            )
        reason = "balance none: the library has no auxiliary loss for this mixture of experts"
        return Causal(packed=packed), reason if experts else ""
    coefficient = float(getattr(config, _COEFFICIENT) or 0.0)
    if fields.balance == "none" or not coefficient or not experts:
        reason = f"balance none: {_COEFFICIENT} {coefficient:g} is not used"
        return Causal(packed=packed), reason if experts else ""
    is_by_row = fields.balance == "sequence"
    kind = RowBalanced if is_by_row else BatchBalanced
    objective = kind(packed=packed, coefficient=coefficient, chosen=int(config.num_experts_per_tok))
    over = "each row" if is_by_row else "the whole batch"
    return objective, f"balance {coefficient:g} x the router's auxiliary loss over {over}"


def _num_experts(config: Any) -> int:
    """The number of experts in a layer; 0: no layer has any."""
    dense = getattr(config, "first_k_dense_replace", 0)  # of deepseek: the first layers have none
    if dense and dense >= config.num_hidden_layers:
        return 0
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(getattr(config, name) or 0) for name in names if hasattr(config, name)), 0)


def _balance(chosen: Tensor, chances: Tensor, routed: Tensor) -> Tensor:
    """The auxiliary loss from sums [..., experts]. It is 0 for a row without tokens."""
    tokens = routed.clamp(min=1)[..., None]
    return chosen.shape[-1] * (chosen / tokens * (chances / tokens)).sum(-1)
