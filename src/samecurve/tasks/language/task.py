"""The language task: a decoder, a corpus, next-token cross-entropy.

No engine is imported here; torch_task.py and jax_task.py bring their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.config.sections import Config
from samecurve.core.determinism.data_order import Ids
from samecurve.core.determinism.init_values import Initial
from samecurve.core.eval_sums import EvalSums, SumSpec, SumSpecs
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.memory import logit_rows
from samecurve.core.protocols import Source
from samecurve.data.tokens import TokenWindows, window_count
from samecurve.errors import RunError, UserError
from samecurve.tasks.language.corpus import Corpus, prepare
from samecurve.tasks.language.fields import LanguageData, LanguageModel
from samecurve.tasks.language.shapes import initial, shapes
from samecurve.tasks.language.tokenizer import Bytes, Library, Tokenizer

TOKENIZER = "tokenizer.json"  # as a run directory's assets keep it


Logits = Callable[[list[int]], NDArray[np.float64]]  # token ids -> the next one's logits


class LanguageTask:
    """All of the task but its model.

    model, data: the config's sections. cache: where token files are kept.

    unfused: whether attention keeps its length x length scores for backward, and the loss all
    logits, where no fused kernel does without.
    """

    unfused = False

    def __init__(self, model: LanguageModel, data: LanguageData, cache: Path) -> None:
        self.fields, self.data = model, data
        self.corpus = prepare(data, cache)
        self.vocab = _vocabulary(model, data, self.corpus)
        self.length = model.max_seq_len
        self._split = self.corpus.count - int(self.corpus.count * data.validation)
        if window_count(self._split, self.length) < 1 or self._split <= self.length:
            raise UserError(
                f"{self.corpus.count} tokens, {self._split} of them to train on, are too few for"
                f" one sample of {self.length}",
                f"more text, or --seq-len {max(1, self._split // 8)}",
                "data.source",
            )

    def facts(self) -> Facts:
        sizes = {name: int(np.prod(shape)) for name, shape in self.shapes().items()}
        params = sum(sizes.values())
        head = self.vocab * self.fields.hidden_size
        matrices = (
            sum(
                size
                for name, size in sizes.items()
                if "norm" not in name and not name.startswith(("embed_tokens", "lm_head"))
            )
            + head
        )
        f, length = self.fields, self.length
        per_token = 6 * matrices + 6 * f.num_layers * f.hidden_size * length
        scores = 2 * f.num_heads * length if self.unfused else 0
        block = 8 * f.hidden_size + 2 * f.groups * f.head_size + 4 * f.inner + scores
        products = (
            3 * f.hidden_size + 2 * f.groups * f.head_size + 2 * f.inner
        )  # of a block, beside its input: what recompute "selective" keeps
        outside = 2 * f.hidden_size + 3 * self.vocab if self.unfused else 4 * f.hidden_size
        rows = (
            {} if self.unfused else {kind: logit_rows(self.vocab, kind) for kind in ("cpu", "cuda")}
        )
        kept = f.num_layers * block + outside
        again = {
            "block": f.num_layers * f.hidden_size + block + outside,
            "selective": f.num_layers * (f.hidden_size + products) + block + outside,
        }
        held_out = self.eval_data()
        return Facts(
            samples=window_count(self._split, length),
            eval_samples=len(held_out) if held_out else 0,
            tokens_per_sample=length,
            params=params,
            trainable=params,
            blocks=f.num_layers,
            bytes_per_sample=4 * length * kept,
            flops_per_sample=float(per_token * length),
            coupled=(),
            fingerprint=self.fingerprint(),
            block_params=sum(size for name, size in sizes.items() if name.startswith("layers.0.")),
            recompute_bytes={how: 4 * length * numbers for how, numbers in again.items()},
            formulas={
                "flops": (
                    f"6 x {matrices} matrix weights + 6 x layers x hidden x length (causal"
                    " attention), a token; Kaplan et al. 2020, Chowdhery et al. 2022"
                ),
                "bytes_per_sample": (
                    "4 B x length x (layers x (8 hidden + 2 kv + 4"
                    f" inner{' + 2 heads x length' if scores else ''}) +"
                    f" {'2 hidden + 3 vocab' if self.unfused else '4 hidden'}), counted from"
                    " torch_model.py"
                ),
                **{
                    f"scratch.{kind}": (
                        f"4 B x (2 x vocab {self.vocab} x {count} tokens at a time + {head}: the"
                        " head's gradient)"
                    )
                    for kind, count in rows.items()
                },
            },
            scratch={kind: 2 * self.vocab * count + head for kind, count in rows.items()},
            block_arrays=tuple(name for name in sizes if name.startswith("layers.")),
            rounded=tuple(
                name for name in sizes if name.startswith("layers.") and "norm" not in name
            ),
            arrays=self.shapes(),
            aliases={"lm_head.weight": "embed_tokens.weight"} if f.tie_embeddings else {},
            reference={
                "unigram_entropy": self.corpus.entropy,
                "tokens": self.corpus.count,
                "vocabulary": self.vocab,
            },
        )

    def fingerprint(self) -> str:
        return f"{self.corpus.sha256}/{self._split}/{self.length}"

    def train_data(self) -> Source:
        return TokenWindows(Path(self.corpus.path), self.corpus.dtype, 0, self._split, self.length)

    def eval_data(self) -> Source | None:
        windows = TokenWindows(
            Path(self.corpus.path), self.corpus.dtype, self._split, self.corpus.count, self.length
        )
        if not len(windows) or self.data.eval_samples == 0:
            return None
        return Spread(windows, min(len(windows), self.data.eval_samples or len(windows)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter by name: the same under each engine."""
        return shapes(self.fields, self.vocab)

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial | None:
        return initial(name, self.fields)

    def eval_sums(self) -> SumSpecs:
        return {"loss_sum": SumSpec(), "correct": SumSpec(), "tokens": SumSpec()}

    def summarize(self, sums: EvalSums) -> dict[str, float]:
        tokens = float(sums["tokens"])
        loss = float(sums["loss_sum"]) / tokens
        return {
            "loss": loss,
            "perplexity": float(np.exp(min(loss, 700.0))),
            "accuracy": float(sums["correct"]) / tokens,
        }

    def continued(self, logits: Logits, seed: int) -> list[str]:
        """The config's prompts, each with what follows."""
        tokenizer = self.corpus.decoder()
        if not self.corpus.size:
            return []  # raw tokens without a tokenizer can't be shown
        return [
            generate(logits, tokenizer, prompt, self.data.sample_tokens, 0.8, seed, self.length)
            for prompt in self.data.prompts
        ]

    def assets(self) -> Mapping[str, Path]:
        return {} if self.corpus.tokenizer == "bytes" else {TOKENIZER: Path(self.corpus.tokenizer)}


class Spread:
    """`count` samples spread evenly over a source."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count = source, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        return self._source[np.asarray(ids) * len(self._source) // self._count]


def generate(
    next_logits: Logits,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    context: int,
) -> str:
    """prompt and its continuation by `tokens` tokens.

    temperature 0: always the likeliest. The same seed gives the same text.
    """
    ids = [int(i) for i in tokenizer.encode([prompt.encode()])] or [
        10 if tokenizer.size > 10 else 0
    ]
    random = np.random.default_rng(seed)
    for _ in range(tokens):
        logits = next_logits(ids[-context:])[: tokenizer.size]
        if not np.isfinite(logits).all():
            raise RunError(
                "the model's logits are not finite: it has nothing to say",
                "an older checkpoint, or a smaller --lr",
            )
        if temperature == 0:
            ids.append(int(logits.argmax()))
            continue
        weights = np.exp((logits - logits.max()) / temperature)
        ids.append(int(random.choice(len(weights), p=weights / weights.sum())))
    return tokenizer.decode(ids)


def facts(config: Config, cache: str) -> Facts:
    """What plan() must know, without an engine."""
    assert isinstance(config.model, LanguageModel)
    assert isinstance(config.data, LanguageData)
    task = LanguageTask(config.model, config.data, Path(cache))
    task.unfused = config.engine == "jax"
    return replace(
        task.facts(),
        **config.optimizer.rules.describe(
            {name: int(np.prod(shape)) for name, shape in task.shapes().items()}
        ),
    )


def speaker(config: Config, assets: Path) -> Tokenizer:
    """What a run's text is written in; the corpus is not needed.

    UserError: the run was trained on raw tokens, so that nothing says what they mean.
    """
    data = config.data
    assert isinstance(data, LanguageData)
    raw = any(source.endswith(".bin") for source in data.sources)
    if raw and not (assets / TOKENIZER).exists():
        raise UserError(
            "this run was trained on raw tokens without a tokenizer: what they mean is not known",
            "train with data.tokenizer=PATH of their tokenizer.json",
            "data.tokenizer",
        )
    return Library(assets / TOKENIZER) if (assets / TOKENIZER).exists() else Bytes()


def _vocabulary(model: LanguageModel, data: LanguageData, corpus: Corpus) -> int:
    """How many tokens the model knows."""
    if not corpus.size and model.vocab_size is None:
        raise UserError(
            f"{data.sources[0]} holds raw tokens; their vocabulary is not known",
            "--set model.vocab_size=N, or --set data.tokenizer=PATH of their tokenizer.json",
            "model.vocab_size",
        )
    vocab = model.vocab_size or corpus.size
    if corpus.size > vocab:
        raise UserError(
            f"model.vocab_size is {vocab}; the tokenizer {data.tokenizer} has {corpus.size} tokens",
            f"--set model.vocab_size={corpus.size}, or leave it out",
            "model.vocab_size",
        )
    if corpus.top >= vocab:
        hint = (
            "; --set data.token_dtype=uint16, if that is what it holds"
            if data.token_dtype == "uint32" and corpus.top >= 1 << 16 and not corpus.size
            else ""
        )
        raise UserError(
            f"the data has token id {corpus.top}; the vocabulary is {vocab}",
            f"--set model.vocab_size={corpus.top + 1}{hint}",
            "model.vocab_size",
        )
    return vocab
