"""The huggingface task without its model: data, tokenizer, the files that a run keeps.

No engine is imported here; the model is in torch_task.py.
"""

import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from samecurve.core.evaluation import CLASS_WEIGHT
from samecurve.seam import Mean, Source, UserError, stamp_file
from samecurve_products.task_parts.classification import summarize_classes
from samecurve_products.text.huggingface.data.document_columns import Learns
from samecurve_products.text.huggingface.data.prepared_data import (
    PreparedData,
    other_data,
    prepare_data,
    stamp_data,
)
from samecurve_products.text.huggingface.data.text_tokenizer import NOTES, TOKENIZER, TextTokenizer
from samecurve_products.text.huggingface.library import read_config
from samecurve_products.text.huggingface.model_directory import (
    BESIDE_WEIGHTS,
    CONFIG,
    classes_of_classifier,
    read_config_file,
)
from samecurve_products.text.huggingface.sections import HFData, HFModel, Objective

if TYPE_CHECKING:  # a run does not show its data
    from samecurve_products.preview.about import AboutData

PROMPTS = "prompts.json"  # among a run's assets: whether a prompt is a turn of a conversation
# fields of a config that no array's shape shows: a difference in the first makes weights
# meaningless, in the second it changes their use
_DECISIVE = ("model_type", "num_attention_heads", "num_key_value_heads")
_CHANGING = ("hidden_act", "rms_norm_eps", "rope_parameters", "rope_theta", "sliding_window")
_LEARNS: Mapping[Objective, Learns] = {"classify": "label", "embed": "pair"}
_KEPT = "model-"  # prefix of a model directory's files among a run's assets
_MOST_EXPONENT = 700.0


class HuggingFaceTask:
    """All of the huggingface task but its model.

    model, data: the config's sections
    cache: where token files are kept
    assets: the files that a run has kept, where its model is only used and needs no data
    """

    @staticmethod
    def other_data(source: str, assets: Path, reference: Mapping[str, float]) -> Mapping[str, Any]:
        """Config values that make `eval -d SOURCE` read all of a source as the run reads its own.

        A classifier keeps its own classes and their weights.
        """
        values = dict(other_data(source, assets))
        classes = classes_of_classifier(assets)
        if classes is not None:
            values["model.classes"] = classes
            values["model.class_weights"] = {
                name.removeprefix(CLASS_WEIGHT): weight
                for name, weight in reference.items()
                if name.startswith(CLASS_WEIGHT)
            }
        return values

    def __init__(
        self, model: HFModel, data: HFData, cache: Path, assets: Path | None = None
    ) -> None:
        self.fields, self.data = model, data
        if model.objective != "causal":  # a row is one text; several would see each other
            self.data = data.model_copy(update={"packing": False})
        self._cache, self._kept = cache, assets
        _refuse_what_is_not_built(model)
        if assets is None and self.prepared.collate is not None:
            self.collate = self.prepared.collate

    @staticmethod
    def data_stamp(data: HFData, model: HFModel) -> object:
        """A stamp of the data's files, the library's version and the model directory's config."""
        try:
            installed = version("transformers")
        except PackageNotFoundError:
            installed = ""
        home = model.directory
        stamp: list[object] = [installed, stamp_data(data, home)]
        if home is not None and (home / CONFIG).is_file():
            stamp += [str(home.resolve()), *stamp_file(home / CONFIG)[1:]]
        return stamp

    @staticmethod
    def first_weights(model: HFModel) -> Path | None:
        return model.directory

    @cached_property
    def prepared(self) -> PreparedData:
        vocab_size = None
        if self.data.is_random:  # tokens are drawn from the model's vocabulary
            vocab_size = read_config(self.fields, self._kept).vocab_size
        classes: Sequence[str] = ()
        if self.classifies:
            classes = self.fields.classes or classes_of_classifier(self.fields.directory) or ()
        return prepare_data(
            self.data,
            self._cache,
            model=self.fields.directory,
            vocab_size=vocab_size,
            learns=_LEARNS.get(self.fields.objective, "tokens"),
            classes=classes,
            for_encoder=self.fields.objective in {"masked", "embed"},
        )

    @property
    def frozen_base(self) -> bool:
        """Whether the model's own weights are frozen, beneath an adapter."""
        return self.fields.adapter is not None

    @property
    def classifies(self) -> bool:
        return self.fields.objective == "classify"

    @property
    def packed(self) -> bool:
        """Whether a row may hold several documents."""
        return self.data.packing and not self.data.is_random

    @cached_property
    def tokenizer(self) -> TextTokenizer | None:
        """The tokenizer; None: tokens are random, or raw ids without one."""
        if self._kept is None:
            return self.prepared.tokenizer
        return TextTokenizer(self._kept) if (self._kept / NOTES).is_file() else None

    @property
    def takes_turns(self) -> bool:
        """Whether a prompt is a turn of a conversation, as in the training data."""
        if self._kept is None:
            return self.prepared.has_chats
        if (self._kept / PROMPTS).is_file():
            return bool(read_config_file(self._kept / PROMPTS)["chat"])
        return self.tokenizer is not None and self.tokenizer.notes.chat_template is not None

    def train_data(self) -> Source:
        return self.prepared.train

    def eval_data(self) -> Source | None:
        return self.prepared.held_out

    def test_data(self) -> Source | None:
        """Rows of the sources' splits named test; None: no source has one."""
        return self.prepared.test

    def fingerprint(self) -> str:
        return self.prepared.fingerprint

    def about_data(self) -> "AboutData":
        """The facts of the documents that `samecurve data show` prints."""
        from samecurve_products.text.huggingface.data.left_out import about_documents

        learns = _LEARNS.get(self.fields.objective, "tokens")
        return about_documents(self.data, self.prepared, learns)

    def summarize(self, totals: Mapping[str, Mean]) -> dict[str, Any]:
        if self.classifies:
            return summarize_classes(totals)
        shown = {name: float(total.sum / total.weight) for name, total in totals.items()}
        if self.fields.objective == "embed":
            return shown
        error = shown.get("cross_entropy", shown.get("loss", 0.0))
        return {**shown, "perplexity": float(np.exp(min(error, _MOST_EXPONENT)))}

    def unlike(self, fields: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Differences of another model's config that no array's shape shows: fatal, and others."""
        there = read_config_file(fields[CONFIG]) if CONFIG in fields else _as_config(fields)
        home = self.fields.directory
        here = _as_config(self.fields.model_dump())
        if home is not None:
            here = {**read_config_file(home / CONFIG), **self.fields.config_fields}
        pairs = {
            name: f"{name} {there[name]}, here {here[name]}"
            for name in (*_DECISIVE, *_CHANGING)
            if name in there and name in here and there[name] != here[name]
        }
        fatal = [pairs[name] for name in _DECISIVE if name in pairs]
        return fatal, [pairs[name] for name in _CHANGING if name in pairs]

    def _tokenizer_assets(self) -> dict[str, Path]:
        """The tokenizer's files, and what lies beside a model directory's weights."""
        kept = {}
        if self.prepared.tokenizer is not None:
            home = self.prepared.tokenizer.home
            kept = {name: home / name for name in (TOKENIZER, NOTES) if (home / name).is_file()}
        directory = self.fields.directory
        if directory is not None:
            there = [name for name in BESIDE_WEIGHTS if (directory / name).is_file()]
            kept |= {f"{_KEPT}{name}": directory / name for name in there}
        return kept

    def _copy_beside(self, to: Path) -> None:
        """Copy the files that a run has kept of the model's directory, under their own names."""
        if self._kept is None:
            return
        for name in BESIDE_WEIGHTS:
            if (self._kept / f"{_KEPT}{name}").is_file():
                shutil.copyfile(self._kept / f"{_KEPT}{name}", to / name)
        if (self._kept / TOKENIZER).is_file():
            shutil.copyfile(self._kept / TOKENIZER, to / TOKENIZER)


def _as_config(section: Mapping[str, Any]) -> dict[str, Any]:
    """A `model` section as fields of the library's config."""
    values = {name: value for name, value in section.items() if value is not None}
    return {**values, "model_type": section["architecture"]} if section.get("architecture") else {}


def _refuse_what_is_not_built(model: HFModel) -> None:
    """UserError: the config asks for a combination that is not built."""
    if model.adapter is not None and model.objective in {"masked", "embed"}:
        raise UserError(
            f"model.adapter with model.objective {model.objective} is not in this version",
            "leave model.adapter out; optimizer.groups freezes weights by their names",
            "model.adapter",
        )
    if model.quantize != "none" and model.adapter is None:
        raise UserError(
            f"model.quantize {model.quantize} without model.adapter: packed weights can't be"
            " trained",
            "model.adapter: {kind: lora}, which is trained on them; or model.quantize: none",
            "model.quantize",
        )
