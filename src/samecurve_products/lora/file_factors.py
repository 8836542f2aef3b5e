"""The factor of an adapter's change, as files state it, beside the factor of the config.

Files in kohya's layout have an array `alpha` for each layer. Files of diffusers may have peft's
config among their metadata, and directories of peft have it beside the weights. A file that states
nothing has the factor 1.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samecurve.run.weights.first_adapter import CONFIG_FILE
from samecurve.seam import UserError
from samecurve_products.lora.sections import AdapterSection

_METADATA = "lora_adapter_metadata"  # of a file that diffusers has written: peft's config
_WHERE = "--init-from"


@dataclass(frozen=True)
class StatedFactors:
    """The factors that peft's config of an adapter states."""

    fields: Mapping[str, Any]  # of peft's config
    rank: int

    @classmethod
    def of(cls, metadata: Mapping[str, str], component: str, rank: int) -> "StatedFactors":
        """Read the metadata of a file, or the config beside it. UserError: it is no JSON."""
        key = CONFIG_FILE if CONFIG_FILE in metadata else _METADATA
        try:
            fields = json.loads(metadata.get(key, "{}"))
            if key == _METADATA:
                prefix = f"{component}."
                fields = {
                    name.removeprefix(prefix): value
                    for name, value in fields.items()
                    if name.startswith(prefix)
                }
            return cls({**fields}, rank)
        except (ValueError, AttributeError, TypeError) as error:
            remedy = "get the file again, or write it again with save_lora_weights()"
            if key == CONFIG_FILE:
                remedy = "get the directory again, or write it again with save_pretrained()"
            what = f"the file's metadata {key}" if key == _METADATA else f"{key} beside the file"
            raise UserError(f"{what} can't be read: {error}", remedy, _WHERE) from None

    def factor(self, layer: str) -> float | None:
        """The factor of a layer's change; None: nothing states it."""
        alpha = self.fields.get("lora_alpha", self.fields.get("alpha"))
        for pattern, own in (self.fields.get("alpha_pattern") or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", layer):
                alpha = own
        if alpha is None:
            return None
        rank = math.sqrt(self.rank) if self.fields.get("use_rslora") else self.rank
        return float(alpha / rank)


def check_config(
    adapter: AdapterSection, ranks: Sequence[int], stated: Sequence[float | None]
) -> str:
    """Compare rank and alpha of a file with the config. Returns a line for the user, or ''.

    A file whose layers have several alphas, or state none, has no alpha that a config could have:
    the factors are then multiplied into the arrays, so that the change is the same.

    ranks: of the file's layers
    stated: factors of the file's layers; None: a layer states none

    UserError: the config has another rank, or another alpha.
    """
    there: dict[str, float] = {}
    rank = ranks[0] if len(set(ranks)) == 1 else adapter.rank
    if rank != adapter.rank:
        there["rank"] = rank
    factors = {_rounded(factor) for factor in stated if factor is not None}
    is_one = len(factors) == 1 and None not in stated
    if is_one and not math.isclose(min(factors) * rank, adapter.alpha, rel_tol=1e-6):
        there["alpha"] = min(factors) * rank
    if there:
        values = {name: f"{value:.7g}" for name, value in there.items()}
        words = [f"{name} {values[name]}, not {getattr(adapter, name):g}" for name in values]
        remedy = [f"model.adapter.{name}: {value}" for name, value in values.items()]
        raise UserError(
            f"the file's adapter has {' and '.join(words)}", " and ".join(remedy), _WHERE
        )
    if is_one or not stated:
        return ""
    if not factors:
        if adapter.scaling == 1:
            return ""
        return (
            "the file states no alpha: what it has is divided by alpha / rank ="
            f" {adapter.scaling:g}, so that its change is the same"
        )
    return (
        f"the file's layers have several factors ({min(factors):g} to {max(factors):g}), and here"
        f" they have one, {adapter.scaling:g}: its arrays are multiplied so that its change is the"
        " same"
    )


def _rounded(factor: float) -> float:
    """A factor without the last digits, which an alpha in few bytes does not have."""
    return float(f"{factor:.7g}")
