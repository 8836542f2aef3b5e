"""The language task: a decoder, a corpus, next-token cross-entropy.

No engine is imported here; the models are in torch_task.py and jax_task.py.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samecurve.data import TokenWindows, spread_out, window_count
from samecurve.seam import Initial, Mean, RunError, Source, UserError
from samecurve_products.text.language import (
    LanguageData,
    LanguageModel,
    model_facts,
    other_data,
)
from samecurve_products.text.language.corpus import (
    Corpora,
    Corpus,
    lines_about,
    prepare_corpora,
    stamp_corpus,
)
from samecurve_products.text_files.tokenizer import ByteTokenizer, LibraryTokenizer, Tokenizer

if TYPE_CHECKING:  # a run does not show its data
    from samecurve_products.preview.about import AboutData

TOKENIZER = "tokenizer.json"  # its name among a run's assets
_LINE_BREAK = 10  # the id that stands for an empty prompt: a line break, in bytes

NextLogits = Callable[[list[int]], NDArray[np.float64]]  # token ids -> logits of the next token


class LanguageTask:
    """All of the language task but its model.

    model, data: the config's sections
    cache: where token files are kept
    engine: the one that trains the model, torch or jax
    assets: the files that a run has kept, where its model is only used and needs no corpus
    """

    metric_names = ("loss", "accuracy")
    data_stamp = staticmethod(stamp_corpus)
    other_data = staticmethod(other_data)
    next_logits: Callable[[Any], NextLogits]  # defined by each engine's class

    def __init__(
        self,
        model: LanguageModel,
        data: LanguageData,
        cache: Path,
        engine: str = "torch",
        assets: Path | None = None,
    ) -> None:
        self.fields, self.data = model, data
        self.length = model.max_seq_len
        # jax has no fused kernels: attention keeps length x length scores, the loss all logits
        self.unfused = engine == "jax"
        self._cache, self._kept = cache, assets

    @cached_property
    def corpora(self) -> Corpora:
        """The token files. UserError: their tokens don't fit the model."""
        corpora = prepare_corpora(self.data, self._cache)
        for corpus in (corpora.train, *corpora.held_out):
            _check_vocabulary(self.fields, self.data, corpus)
        return corpora

    @property
    def corpus(self) -> Corpus:
        """The token file that is trained on."""
        return self.corpora.train

    @cached_property
    def vocab(self) -> int:
        """The number of different tokens that the model knows."""
        if self.fields.vocab_size is not None:
            return self.fields.vocab_size
        return self.tokenizer().size if self._kept else self.corpus.vocab_size

    @cached_property
    def _num_train_tokens(self) -> int:
        """Tokens that are trained on; the rest is held out. UserError: too few for one sample.

        Where a source has a split named validation, all of the training text is trained on.
        """
        vocab, corpus = self.vocab, self.corpus
        assert vocab
        share = 0.0 if self.corpora.validation else self.data.validation
        count = corpus.num_tokens - int(corpus.num_tokens * share)
        if window_count(count, self.length) < 1 or count <= self.length:
            raise UserError(
                f"{corpus.num_tokens} tokens, {count} of them to train on, are too few for"
                f" one sample of {self.length}",
                f"more text, or --seq-len {max(1, count // 8)}",
                "data.source",
            )
        return count

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text.

        UserError: the run was trained on raw tokens, and no tokenizer is known.
        """
        if self._kept is None:
            return self.corpus.decoder()
        if (self._kept / TOKENIZER).exists():
            return LibraryTokenizer(self._kept / TOKENIZER)
        if any(source.endswith(".bin") for source in self.data.sources):
            raise UserError(
                "this run was trained on raw tokens without a tokenizer: what they mean is not"
                " known",
                "train with data.tokenizer=PATH of their tokenizer.json",
                "data.tokenizer",
            )
        return ByteTokenizer()

    def facts(self) -> dict[str, Any]:
        return {
            **model_facts(self.fields, self.vocab, unfused=self.unfused),
            "notes": tuple(f"data {line}" for line in self.corpora.lines),
            "reference": {
                "unigram_entropy": self.corpus.entropy,
                "tokens": self.corpus.num_tokens,
                "vocabulary": self.vocab,
            },
        }

    def fingerprint(self) -> str:
        held_out = "".join(f"/{corpus.sha256}" for corpus in self.corpora.held_out)
        return f"{self.corpus.sha256}/{self._num_train_tokens}/{self.length}{held_out}"

    def train_data(self) -> Source:
        return self._windows(self.corpus, 0, self._num_train_tokens)

    def eval_data(self) -> Source | None:
        """Samples of the splits named validation; else of the share that is held out."""
        validation = self.corpora.validation
        if validation is not None:
            windows = self._windows(validation, 0, validation.num_tokens)
        else:
            first_held_out = self._num_train_tokens
            windows = self._windows(self.corpus, first_held_out, self.corpus.num_tokens)
        return spread_out(windows, self.data.eval_samples)

    def test_data(self) -> Source | None:
        """Samples of the splits named test; None: no source has one."""
        test = self.corpora.test
        if test is None:
            return None
        return spread_out(self._windows(test, 0, test.num_tokens), None)

    def _windows(self, corpus: Corpus, first: int, last: int) -> TokenWindows:
        """Samples of the tokens [first, last)."""
        return TokenWindows(Path(corpus.path), corpus.dtype, first, last, self.length)

    def about_data(self) -> "AboutData":
        """The facts of the corpus that `samecurve data show` prints."""
        from samecurve_products.preview.about import AboutData

        count = self._num_train_tokens
        decode = self.tokenizer().decode if self.corpus.vocab_size else None
        lines = [*self.corpora.lines, *lines_about(self.data, self.corpora)]
        return AboutData(
            decode=None if decode is None else partial(decode, special=True),
            tokens=count,
            loss_tokens=count - 1,  # the first has nothing before it
            lines=lines,
            left_out=(),
        )

    def initial(self, name: str, _shape: tuple[int, ...]) -> Initial | None:
        """GPT-2's initial values: norms begin as ones, matrices with a deviation of 0.02.

        Matrices whose products are added to the residual stream begin smaller, by the root of the
        number of additions.
        Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section
        2.3.
        """
        if "norm" in name:
            return Initial(0.0, 1.0)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return Initial(0.02 / (2 * self.fields.num_layers) ** 0.5)
        return Initial(0.02)

    def summarize(self, totals: Mapping[str, Mean]) -> dict[str, float]:
        loss = totals["loss"].sum / totals["loss"].weight
        return {
            "perplexity": float(np.exp(min(loss, 700.0))),
            "accuracy": totals["accuracy"].sum / totals["accuracy"].weight,
        }

    def sample(self, model: Any, seed: int) -> list[str]:
        """The config's prompts, each with the model's continuation."""
        if not self.corpus.vocab_size:
            return []  # raw tokens without a tokenizer can't be shown
        count = self.data.sample_tokens
        return [
            self.respond(model, prompt, tokens=count, temperature=0.8, seed=seed)
            for prompt in self.data.prompts
        ]

    def respond(
        self, model: Any, prompt: str, *, tokens: int, temperature: float, seed: int
    ) -> str:
        """The prompt and its continuation; the same seed gives the same text."""
        tokenizer = self.tokenizer()
        ids = [int(i) for i in tokenizer.encode([prompt])[0]]
        if not ids:
            ids = [_LINE_BREAK if tokenizer.size > _LINE_BREAK else 0]
        random = np.random.default_rng(seed)
        next_logits = self.next_logits(model)
        for _ in range(tokens):
            logits = next_logits(ids[-self.length :])[: tokenizer.size]
            ids.append(draw_token(logits, temperature, random))
        return tokenizer.decode(ids)

    def export_hf(
        self, tensors: Mapping[str, Any], directory: Path, dtype: str
    ) -> tuple[dict[str, Any], list[str]]:
        from samecurve_products.text.language.llama_files import hf_name, write_config
        from samecurve_products.text_files.tokenizer_files import write_tokenizer

        renamed = {hf_name(name): tensor for name, tensor in tensors.items()}
        write_config(self.fields, self.vocab, dtype, directory)
        try:
            self.tokenizer()
        except UserError as error:
            return renamed, [f"no tokenizer is written: {error.cause}"]
        source = None
        if self._kept and (self._kept / TOKENIZER).exists():
            source = self._kept / TOKENIZER
        return renamed, write_tokenizer(source, directory, self.length)

    def load_hf(self, names: Sequence[str]) -> dict[str, str]:
        from samecurve_products.text.language.llama_files import names_from_hf

        return names_from_hf(names)

    def unlike(self, fields: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        from samecurve_products.text.language.llama_files import compare_with_hf

        return compare_with_hf(self.fields, fields)

    def assets(self) -> Mapping[str, Path]:
        if self.corpus.tokenizer == "bytes":
            return {}
        return {TOKENIZER: Path(self.corpus.tokenizer)}


def draw_token(logits: NDArray[np.float64], temperature: float, random: np.random.Generator) -> int:
    """Draw the next token. temperature 0: always the likeliest.

    RunError: the logits are not finite.
    """
    if not np.isfinite(logits).all():
        raise RunError(
            "the model's logits are not finite: no token can be drawn",
            "an older checkpoint, or a smaller --lr",
        )
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / temperature)
    return int(random.choice(len(weights), p=weights / weights.sum()))


def _check_vocabulary(model: LanguageModel, data: LanguageData, corpus: Corpus) -> None:
    """UserError: the model would not know all tokens of the corpus."""
    if not corpus.vocab_size and model.vocab_size is None:
        raise UserError(
            f"{data.sources[0]} holds raw tokens; their vocabulary is not known",
            "--set model.vocab_size=N, or --set data.tokenizer=PATH of their tokenizer.json",
            "model.vocab_size",
        )
    vocab = model.vocab_size or corpus.vocab_size
    if corpus.vocab_size > vocab:
        raise UserError(
            f"model.vocab_size is {vocab}; the tokenizer {data.tokenizer} has {corpus.vocab_size}"
            " tokens",
            f"--set model.vocab_size={corpus.vocab_size}, or leave it out",
            "model.vocab_size",
        )
    if corpus.largest_id >= vocab:
        hint = ""
        wide = data.token_dtype == "uint32" and corpus.largest_id >= 1 << 16
        if wide and not corpus.vocab_size:
            hint = "; --set data.token_dtype=uint16, if that is what it holds"
        raise UserError(
            f"the data has token id {corpus.largest_id}; the vocabulary is {vocab}",
            f"--set model.vocab_size={corpus.largest_id + 1}{hint}",
            "model.vocab_size",
        )
