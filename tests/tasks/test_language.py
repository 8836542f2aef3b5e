"""The language task: its corpus, its decoder, and the figures it gives to plan()."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from samecurve.core.protocols import Initial
from samecurve.core.weights import values
from samecurve.data import IGNORED
from samecurve.errors import UserError
from samecurve.torch_engine.optimizers import hidden_matrices
from samecurve_products.text.language import LanguageData, LanguageModel, model_facts
from samecurve_products.text.language.corpus import prepare_corpora
from samecurve_products.text.language.torch_task import Decoder, TorchLanguage

FIELDS = LanguageModel(
    hidden_size=64, num_layers=3, num_heads=4, kv_heads=2, intermediate_size=96, max_seq_len=32
)


def task(corpus: Path, cache: Path, fields: LanguageModel = FIELDS, **data: Any) -> TorchLanguage:
    return TorchLanguage(fields, LanguageData(source=str(corpus), **data), cache)


def test_bytes_of_the_standard_library(cache: Path) -> None:
    """Real text that needs no download: millions of bytes, of the entropy that English-like code
    has.
    """
    corpus = prepare_corpora(LanguageData(), cache).train
    assert corpus.num_tokens == corpus.text_bytes > 5_000_000
    assert 3.0 < corpus.entropy < 3.5
    assert prepare_corpora(LanguageData(), cache).train == corpus


def test_a_bpe_is_trained_once_and_reads_back_what_it_was_given(
    corpus: Path, cache: Path, tmp_path: Path
) -> None:
    made = prepare_corpora(LanguageData(source=str(corpus), tokenizer="bpe:300"), cache).train
    assert 256 < made.vocab_size <= 300
    assert made.num_tokens < made.text_bytes
    ids = np.fromfile(made.path, made.dtype)
    assert made.decoder().decode(ids.tolist()) == corpus.read_text()
    kept = tmp_path / "mine.json"
    kept.write_text(Path(made.tokenizer).read_text())
    again = prepare_corpora(LanguageData(source=str(corpus), tokenizer=str(kept)), cache).train
    assert again.sha256 == made.sha256


def test_a_changed_file_is_tokenized_anew(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("one " * 50)
    (tmp_path / ".hidden").write_text("secret")
    first = prepare_corpora(LanguageData(source=str(tmp_path)), cache).train
    (tmp_path / "b.txt").write_text("two")
    both = LanguageData(source=[str(tmp_path / "*.txt"), str(tmp_path / "a.txt")])
    second = prepare_corpora(both, cache).train
    assert (first.num_tokens, second.num_tokens) == (200, 203)


def test_a_tokenizer_file_that_is_none(corpus: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(UserError, match=r"is no tokenizer\.json"):
        prepare_corpora(
            LanguageData(source=str(corpus), tokenizer=str(tmp_path / "bad.json")), cache
        )


def test_validation_and_training_share_no_token_and_miss_none(corpus: Path, cache: Path) -> None:
    made = task(corpus, cache, validation=0.25)
    train, held = made.train_data(), made.eval_data()
    assert held is not None
    labels = [source[np.arange(len(source))]["labels"] for source in (train, held)]
    counts = [int((part != IGNORED).sum()) for part in labels]
    assert (
        sum(counts) == made.corpus.num_tokens - 2
    )  # the first token of each part is predicted by nothing
    assert counts[1] == pytest.approx(0.25 * made.corpus.num_tokens, rel=0.01)


def test_a_token_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = Decoder(FIELDS, 256).double()
    tokens = torch.randint(0, 256, (2, 32))
    changed = tokens.clone()
    changed[:, 20:] = 7
    first, second = model(tokens), model(changed)
    torch.testing.assert_close(first[:, :20], second[:, :20], rtol=0, atol=0)
    assert (first[:, 20:] != second[:, 20:]).any()
    assert first.dtype == torch.float64


def test_shared_key_heads_equal_repeated_ones() -> None:
    torch.manual_seed(0)
    few, many = (
        Decoder(FIELDS, 50).double(),
        Decoder(FIELDS.model_copy(update={"kv_heads": 4}), 50).double(),
    )
    weights = few.state_dict()
    for name in [name for name in weights if "k_proj" in name or "v_proj" in name]:
        weights[name] = weights[name].view(2, 16, 64).repeat_interleave(2, dim=0).reshape(64, 64)
    many.load_state_dict(weights)
    tokens = torch.randint(0, 50, (1, 32))
    torch.testing.assert_close(few(tokens), many(tokens), rtol=1e-12, atol=1e-12)


def test_initial_values_follow_from_seed_name_and_shape_alone() -> None:
    drawn = values(3, "layers.0.mlp.up_proj.weight", (300, 200), Initial(0.02))
    np.testing.assert_array_equal(
        drawn, values(3, "layers.0.mlp.up_proj.weight", (300, 200), Initial(0.02))
    )
    assert float(drawn.std()) == pytest.approx(0.02, rel=0.02)
    assert float(drawn[0, 0]) == pytest.approx(
        -0.018871938809752464, rel=1e-6
    )  # pinned: a resumed or repeated run must find the same
    assert (
        abs(
            np.corrcoef(
                drawn.ravel(),
                values(4, "layers.0.mlp.up_proj.weight", (300, 200), Initial(0.02)).ravel(),
            )[0, 1]
        )
        < 0.02
    )
    assert values(3, "norm.weight", (3,), Initial(0.0, 1.0)).tolist() == [1.0] * 3


def kept_by_autograd(
    made: TorchLanguage, model: torch.nn.Module, batch: dict[str, torch.Tensor]
) -> int:
    """Bytes that autograd keeps of a batch for the backward pass, without the weights."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = made.loss(model, batch).sum
    assert loss.isfinite()
    return sum(kept.values())


@pytest.mark.parametrize("tied", [False, True])
def test_facts_are_those_of_the_model(corpus: Path, cache: Path, *, tied: bool) -> None:
    """Parameters exactly; FLOPs as torch counts them (attention apart, and then without its mask,
    so twice); kept activations within a tenth of what autograd holds.
    """
    fields = FIELDS.model_copy(
        update={"tie_embeddings": tied, "max_seq_len": 64, "hidden_size": 128}
    )
    made = task(corpus, cache, fields)
    facts, model = model_facts(fields, made.vocab, unfused=False), made.model()
    assert facts["params"] == sum(p.numel() for p in model.parameters())
    assert facts["hidden_matrices"] == hidden_matrices(model)
    batch = {
        name: torch.from_numpy(array) for name, array in made.train_data()[np.arange(4)].items()
    }
    counted = []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(kernel):
            torch.autograd.backward(made.loss(model, batch).sum)
        by_operation = counter.get_flop_counts()["Global"].items()  # torch 2.15 counts flash's
        counted.append(sum(flops for name, flops in by_operation if "flash" not in str(name)))
    assert 4 * facts["flops_per_sample"] == counted[0] + (counted[1] - counted[0]) / 2
    activations = kept_by_autograd(made, model, batch) - 4 * 128 * made.vocab  # in `scratch`
    assert activations <= 4 * facts["bytes_per_sample"] <= 1.1 * activations


@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_kept_activations_are_counted_by_the_kernels_of_gpus(
    precision: str, corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In f32 their fused attention wants keys for each head; in f64 they have none."""
    fields = FIELDS.model_copy(update={"max_seq_len": 64, "hidden_size": 128})
    made = task(corpus, cache, fields)
    facts, model = model_facts(fields, made.vocab, unfused=False), made.model()
    kernel, width = SDPBackend.FLASH_ATTENTION, 4
    if precision == "f64":
        kernel, width, model = SDPBackend.MATH, 8, model.double()
    rows = made.train_data()[np.arange(4)]
    batch = {name: torch.from_numpy(array) for name, array in rows.items()}
    monkeypatch.setattr(
        "samecurve_products.text.language.torch_task.takes_groups", lambda _query: False
    )
    with sdpa_kernel(kernel):
        kept = kept_by_autograd(made, model, batch)
    activations = kept - width * 128 * made.vocab  # the head's gradient is in `scratch`
    assert activations <= 4 * facts["gpu_bytes"][precision]["none"] <= 1.1 * activations
