"""The huggingface task without its model: data, tokenizer, what is kept of a run.

No engine is imported here; torch_task.py brings the model.
"""

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import Source
from samecurve.data.tokens import TokenWindows
from samecurve.errors import UserError
from samecurve.tasks.huggingface.data_section import HFData
from samecurve.tasks.huggingface.library import CONFIG
from samecurve.tasks.huggingface.rows import RandomRows, WindowRows
from samecurve.tasks.huggingface.sections import HFModel
from samecurve.tasks.language.corpus import Corpus, prepare_corpus, stamp_corpus
from samecurve.tasks.language.sections import LanguageData

_HELD_OUT = 64  # rows of random tokens
_MOST_EXPONENT = 700.0


class HuggingFaceTask:
    """All of the task but its model.

    model, data: the config's sections
    cache: where token files are kept
    assets: what a run has kept, where its model is only used: the data is not needed then
    """

    def __init__(
        self, model: HFModel, data: HFData, cache: Path, assets: Path | None = None
    ) -> None:
        self.fields, self.data = model, data
        self._cache, self._kept = cache, assets
        _refuse_what_is_not_built(model)

    @staticmethod
    def data_stamp(data: HFData) -> object:
        if data.is_random:
            return "random"
        return stamp_corpus(_corpus_section(data))

    @staticmethod
    def model_stamp(model: HFModel) -> object:
        """The library's version, and the directory's config."""
        try:
            installed = version("transformers")
        except PackageNotFoundError:
            installed = ""
        if model.path is None:
            return [installed]
        file = Path(model.path).expanduser() / CONFIG
        if not file.is_file():
            return [installed, str(file)]
        status = file.stat()
        return [installed, str(file.resolve()), status.st_size, status.st_mtime_ns]

    @cached_property
    def corpus(self) -> Corpus:
        """The token file."""
        return prepare_corpus(_corpus_section(self.data), self._cache)

    @property
    def vocab_size(self) -> int:
        """The model's. UserError: not known."""
        raise NotImplementedError

    @property
    def packed(self) -> bool:
        """Whether a row may hold several documents."""
        return False

    def train_data(self) -> Source:
        length = self.data.seq_len
        if self.data.is_random:
            return RandomRows(0, self.data.samples, length, self.vocab_size)
        return WindowRows(self._windows(0, self._num_train_tokens))

    def eval_data(self) -> Source | None:
        if self.data.eval_samples == 0:
            return None
        if self.data.is_random:
            count = self.data.eval_samples or _HELD_OUT
            return RandomRows(self.data.samples, count, self.data.seq_len, self.vocab_size)
        windows = self._windows(self._num_train_tokens, self.corpus.num_tokens)
        return WindowRows(windows) if len(windows) else None

    def fingerprint(self) -> str:
        length = self.data.seq_len
        if self.data.is_random:
            return f"random/{self.vocab_size}/{self.data.samples}/{length}"
        return f"{self.corpus.sha256}/{self._num_train_tokens}/{length}"

    def summarize(self, totals: Mapping[str, Mean]) -> dict[str, float]:
        shown = {name: float(total.sum / total.weight) for name, total in totals.items()}
        error = shown.get("cross_entropy", shown.get("loss", 0.0))
        return {**shown, "perplexity": float(np.exp(min(error, _MOST_EXPONENT)))}

    def _windows(self, first: int, last: int) -> TokenWindows:
        corpus = self.corpus
        return TokenWindows(Path(corpus.path), corpus.dtype, first, last, self.data.seq_len)

    @property
    def _num_train_tokens(self) -> int:
        count = self.corpus.num_tokens
        return count - int(count * self.data.validation)


def _refuse_what_is_not_built(model: HFModel) -> None:
    """UserError: by its name."""
    if model.objective != "causal":
        raise UserError(
            f"model.objective {model.objective} is not in this version",
            "model.objective: causal",
            "model.objective",
        )
    if model.adapter is not None:
        raise UserError(
            "model.adapter is not in this version: all weights are trained",
            "leave it out; optimizer.groups freezes weights by their names",
            "model.adapter",
        )
    if model.quantize != "none":
        raise UserError(
            f"model.quantize {model.quantize} is not in this version",
            "model.quantize: none",
            "model.quantize",
        )


def _corpus_section(data: HFData) -> LanguageData:
    return LanguageData(
        source=[item.source for item in data.sources], tokenizer=data.tokenizer or "bytes"
    )
