"""Random numbers in code that nobody changed: they follow the sample, or the step."""

import copy
import hashlib
import math
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import drawing
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from one_curve import compare
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.determinism.sample_keys import RowKeys, mix, row_keys, step_key
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.errors import UserError
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.randomness import MicroBatchContext, StagedKeys, replaced_functions
from samecurve.torch_engine.randomness.draw_sites import Draw, DrawSites
from samecurve.torch_engine.randomness.dropout_layers import key_dropout
from samecurve.torch_engine.randomness.replaced_functions import KEYED_FUNCTIONS, ReplacedFunctions
from samecurve.torch_engine.randomness.served_functions import served_functions
from samecurve.torch_engine.users_code.side_effects import GeneratorStates
from tiny import MACHINE
from worlds import Pool

HERE = Path(__file__).parent
SEED, EPOCH, STEP = 5, 2, 9
CPU = torch.device("cpu")


def staged(ids: Any, epoch: int = EPOCH) -> StagedKeys:
    return StagedKeys(RowKeys(SEED, epoch, STEP, np.asarray(ids)))


class Harness:
    """Functions of rows, run as microbatches."""

    def __init__(self) -> None:
        self.context = MicroBatchContext(CPU, DrawSites())

    def run(self, function: Callable[[torch.Tensor], torch.Tensor], ids: Any) -> torch.Tensor:
        """function(rows), the rows being 0.1 to 0.9 in the shape of [5, 6] each."""
        rows = torch.rand(40, 5, 6, generator=torch.Generator().manual_seed(1)) * 0.8 + 0.1
        with self.context.within(staged(ids)):
            return function(rows[list(ids)])


@pytest.fixture(scope="module")
def functions() -> Any:
    KEYED_FUNCTIONS.acquire()
    yield KEYED_FUNCTIONS
    KEYED_FUNCTIONS.release()


@pytest.fixture
def harness(functions: ReplacedFunctions) -> Harness:
    del functions  # which are replaced meanwhile
    return Harness()


def seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return build()


LSTM = seeded(lambda: nn.LSTM(6, 6, 3, dropout=0.5, batch_first=True))
GRU = seeded(lambda: nn.GRU(6, 6, 2, dropout=0.5, bidirectional=True))
RNN = seeded(lambda: nn.RNN(6, 6, 2, dropout=0.3, nonlinearity="relu", batch_first=True))
ATTENTION = seeded(lambda: nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True))
LAYER = seeded(lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True))
SPREAD = torch.distributions


def packed(x: torch.Tensor) -> torch.Tensor:
    """Sequences of unlike lengths, in any order."""
    lengths = [1 + int(row[0, 0] * 50) % 5 for row in x]
    held = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    result: torch.Tensor = nn.utils.rnn.pad_packed_sequence(
        LSTM(held)[0], batch_first=True, total_length=5
    )[0]
    return result


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: torch.rand(len(x), 3),
    "rand of bf16": lambda x: torch.rand((len(x), 3), dtype=torch.bfloat16),
    "rand of complex": lambda x: torch.rand(len(x), 3, dtype=torch.complex64),
    "randn": lambda x: torch.randn(size=(len(x), 3), dtype=torch.float64),
    "randn of complex": lambda x: torch.randn(len(x), 3, dtype=torch.complex64),
    "randn_like": lambda x: vars(drawing)["randn_like"](x, dtype=torch.float64),
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randint": lambda x: torch.randint(0, 1000, (len(x),)),
    "randint to": lambda x: torch.randint(10, size=(len(x), 2)),
    "randint_like": lambda x: torch.randint_like(x, 7),
    "normal of a mean": lambda x: torch.normal(x, 2.0),
    "normal of both": lambda x: torch.normal(x, x),
    "normal of a spread": lambda x: torch.normal(2.0, x),
    "normal of a size": lambda x: torch.normal(0.0, 1.0, (len(x), 4)),
    "bernoulli": lambda x: torch.bernoulli(input=x),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "x.bernoulli": lambda x: x.bernoulli(),
    "multinomial": lambda x: torch.multinomial(x[:, 0], 2),
    "multinomial of one": lambda x: torch.multinomial(torch.arange(1.0, 9), len(x), True),
    "normal_": lambda x: x.clone().normal_(1, 2),
    "uniform_": lambda x: x.clone().uniform_(1, 2),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "random_": lambda x: x.clone().random_(0, 99),
    "poisson": lambda x: torch.poisson(input=x * 50),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 99), x),
    "gumbel_softmax": F.gumbel_softmax,
    "Gamma": lambda x: SPREAD.Gamma(x + 1, x + 1).rsample(),
    "Dirichlet": lambda x: SPREAD.Dirichlet(x + 0.1).rsample(),
    "Normal": lambda x: SPREAD.Normal(x, 1).rsample(),
    "Uniform": lambda x: SPREAD.Uniform(x, x + 1).rsample(),
    "Laplace": lambda x: SPREAD.Laplace(x, 1).rsample(),
    "Categorical": lambda x: SPREAD.Categorical(x).sample(),  # type: ignore[no-untyped-call]
    "dropout": F.dropout,
    "dropout of flat rows": lambda x: F.dropout(x.flatten(0, 1)).view_as(x),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout1d": F.dropout1d,
    "dropout2d": lambda x: F.dropout2d(x[..., None]),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "AlphaDropout": nn.AlphaDropout(0.3),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "LSTM": lambda x: LSTM(x)[0],
    "LSTM packed": packed,
    "GRU": lambda x: GRU(x.transpose(0, 1))[0].transpose(0, 1),
    "RNN": lambda x: RNN(x)[0],
    "attention": lambda x: ATTENTION(x, x, x)[0],
    "attention fused": lambda x: ATTENTION(x, x, x, need_weights=False)[0],
    "TransformerEncoderLayer": LAYER,
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        x, x, x, dropout_p=0.3, is_causal=True
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_function_follows_the_samples(name: str, harness: Harness) -> None:
    """Whole, in parts and in another order; other samples draw others, and no generator moves."""
    draw, ids = DRAWS[name], list(range(9))
    watch = GeneratorStates(CPU)
    whole = harness.run(draw, ids)
    assert torch.equal(whole, harness.run(draw, ids))
    parts = torch.cat([harness.run(draw, ids[:4]), harness.run(draw, ids[4:])])
    turned = harness.run(draw, ids[::-1]).flip(0)
    for other in (parts, turned):
        torch.testing.assert_close(other, whole, rtol=1e-5, atol=1e-6)
    assert watch.changed() == []
    for seed in (0, 1):
        torch.manual_seed(seed)
        assert torch.equal(whole, harness.run(draw, ids))
    harness.context.begin(None)
    with harness.context.within(staged(ids, EPOCH + 1)):
        rows = torch.rand(40, 5, 6, generator=torch.Generator().manual_seed(1)) * 0.8 + 0.1
        assert not torch.equal(draw(rows[ids]), whole)


def test_each_name_that_is_replaced_is_served() -> None:
    names = {
        torch: replaced_functions._TORCH,
        torch._VF: replaced_functions._INNER,
        torch.Tensor: replaced_functions._METHODS,
        F: (replaced_functions._ATTENTION,),
    }
    for owner, replaced in names.items():
        assert sorted(served_functions(owner)) == sorted(replaced)


def test_outside_of_a_microbatch_all_is_as_ever(harness: Harness) -> None:
    """Also on another thread meanwhile, and after the last engine is closed."""
    held = {name: vars(sys.modules["drawing"])[name] for name in ("dropout", "randn_like")}
    assert held == {"dropout": F.dropout, "randn_like": torch.randn_like}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(torch.rand(2, generator=torch.Generator().manual_seed(3)), expected)
    KEYED_FUNCTIONS.acquire()
    KEYED_FUNCTIONS.release()
    assert not torch.equal(
        harness.run(lambda x: torch.rand(len(x)), [1]),
        harness.run(lambda x: torch.rand(len(x)), [2]),
    )


def signed(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def hashed(value: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        value = (value ^ value >> shift) * factor % (1 << 32)
    return value


def lane_pair(key: int, name: str, call: int, element: int, line: int = 0) -> int:
    """keyed/numbers.py's docstring, in Python's own integers, signed.

    element, line: the last two coordinates in the row
    """
    salt = int.from_bytes(hashlib.sha256(f"0/{name}/{call}".encode()).digest()[:8], "little")
    mixed = int(mix(np.array([key ^ salt], np.uint64))[0])
    a, b = signed(mixed | 1), signed(mixed >> 32)
    place = hashed(element) ^ hashed(1 << 28 | line) ^ hashed(1 << 28)
    x = signed(place * a + b)
    return signed((x ^ x >> 15) * 0x2C1B3C6D)


def word(key: int, name: str, call: int, element: int, line: int = 0) -> int:
    x = lane_pair(key, name, call, element, line)
    return signed((x ^ x >> 13) * 0x31848BAB)


def uniform(key: int, call: int, count: int, line: int = 0) -> NDArray[np.float64]:
    """What a line of a row draws in float64."""
    found = []
    for element in range(count):
        low, high = (word(key, "*", call, 2 * element + half, line) for half in (0, 1))
        found.append(((high * 2**32 + low % 2**32) >> 11) * 2.0**-53 + 0.5)
    return np.array(found)


def test_numbers_are_those_of_the_formula(harness: Harness) -> None:
    ids = [3, 17]

    def draw(x: torch.Tensor) -> torch.Tensor:
        first = torch.rand(len(x), 3, dtype=torch.float64)
        second = torch.randn(len(x), 3, dtype=torch.float64)
        third = torch.randint(-5, 95, (len(x), 3)).double()
        shared = torch.rand(3, dtype=torch.float64)
        return torch.cat([first, second, third, shared.expand(len(x), 3)], 1)

    found = harness.run(draw, ids).numpy()
    shared = uniform(step_key(SEED, EPOCH, STEP), 3, 3)
    for row, key in zip(found, row_keys(SEED, EPOCH, np.array(ids)).tolist(), strict=True):
        normal = noise(key, 1, (4,))[:3]
        integers = [(word(key, "*", 2, j) + 2**31) * 100 // 2**32 - 5 for j in range(3)]
        expected = np.concatenate([uniform(key, 0, 3), normal, integers, shared])
        np.testing.assert_allclose(row, expected, rtol=1e-14)


def test_numbers_are_as_good_as_random(harness: Harness) -> None:
    """Moments and extremes of uniform and normal numbers, the hits of each 1/64, and no correlation
    of rows, draws or neighbours, within 4 sigma (5 for the worst of many).
    """

    def draws(_x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.rand(40, 20_000), torch.rand(40, 100, 200).flatten(1)])

    values = harness.run(draws, range(40)).double()
    centred, count = values - 0.5, values.numel()
    assert abs(centred.mean()) < 4 * math.sqrt(1 / 12 / count)
    assert abs(centred.square().mean() - 1 / 12) < 4 * math.sqrt(1 / 180 / count)
    hits = torch.histc(values, 64, 0, 1)
    assert ((hits - count / 64).abs() < 5 * math.sqrt(count / 64)).all()
    pairs = {
        "neighbours": centred[..., 1:] * centred[..., :-1],
        "second neighbours": centred[..., 2:] * centred[..., :-2],
        "rows": centred[:, 1:] * centred[:, :-1],
        "draws": centred[0] * centred[1],
    }
    sigmas = {
        name: float(product.mean().abs() * 12 * math.sqrt(product.numel()))
        for name, product in pairs.items()
    }
    assert max(sigmas.values()) < 4, sigmas
    normal = harness.run(lambda x: torch.randn(len(x), 20_000), range(40)).double()
    count = normal.numel()
    assert abs(normal.mean()) < 4 / math.sqrt(count)
    assert abs(normal.square().mean() - 1) < 4 * math.sqrt(2 / count)
    assert abs(normal.pow(4).mean() - 3) < 4 * math.sqrt(96 / count)
    assert 4.2 < normal.abs().max() < 6
    inside = normal.abs() < 0.6744897501960817
    assert abs(inside.double().mean() - 0.5) < 4 * 0.5 / math.sqrt(count)


def with_ones(p: float, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.ones(len(x), 10_000), p)


def test_masks_have_their_rate_and_keep_the_mean(harness: Harness) -> None:
    for p in (0.1, 0.5, 1.0):
        found = harness.run(partial(with_ones, p), range(40))
        share = (found == 0).double().mean()
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / found.numel()) + 1e-5
        if p < 1:
            assert abs(found.mean() - 1) < 5 * math.sqrt(p / (1 - p) / found.numel())
    noise = torch.randn(40, 10_000, generator=torch.Generator().manual_seed(0))
    found = harness.run(lambda _x: F.alpha_dropout(noise, 0.2, training=True), range(40))
    assert abs(found.mean()) < 0.01
    assert abs(found.var() - 1) < 0.01


def test_layers_with_dropout_inside_are_what_torch_documents(harness: Harness) -> None:
    """An LSTM is its layers with masks between; attention drops its weights; gradients too."""
    x = torch.rand(4, 5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    lstm = seeded(lambda: nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True).double())
    layers = [nn.LSTM(6, 6, batch_first=True).double() for _ in range(2)]
    for index, layer in enumerate(layers):
        named = dict(lstm.named_parameters())
        state = {name: named[name.replace("l0", f"l{index}")] for name in layer.state_dict()}
        layer.load_state_dict(state)

    def composed(x: torch.Tensor) -> torch.Tensor:
        return layers[1](F.dropout(layers[0](x)[0], 0.5))[0]  # type: ignore[no-any-return]

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        weights = (x @ x.transpose(1, 2) / math.sqrt(6)).softmax(-1)
        return F.dropout(weights, 0.3) @ x

    pairs: list[tuple[Any, Any]] = [
        (lambda x: lstm(x)[0], composed),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3), by_hand),
    ]
    for mine, theirs in pairs:
        results = []
        for function in (mine, theirs):
            leaf = x.clone().requires_grad_()
            with harness.context.within(staged(range(4))):
                value = function(leaf)
                results += [value, *torch.autograd.grad(value.square().sum(), leaf)]
        torch.testing.assert_close(results[:2], results[2:], rtol=1e-12, atol=1e-12)


def gradients(
    harness: Harness, again: Callable[..., Any], compile_with: str | None = None
) -> list[torch.Tensor]:
    """Of a model that draws in every way, its blocks run by `again`."""
    model = seeded(lambda: nn.ModuleList([drawing.Functional(), drawing.Noisy()]).double())
    if compile_with:
        for block in model:
            block.forward = torch.compile(block.forward, dynamic=False, backend=compile_with)

    def loss(x: torch.Tensor) -> torch.Tensor:
        x = x.double().requires_grad_()
        for block in model:
            x = again(block, x)
        total = (x * torch.rand_like(x)).square().sum()
        torch.autograd.backward(total)
        return total.detach()

    value = harness.run(loss, range(6))
    return [value, *(p.grad for p in model.parameters() if p.grad is not None)]


AGAIN: dict[str, Callable[..., Any]] = {
    "not reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "twice": lambda block, x: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=False), x, use_reentrant=False
    ),
    "twice reentrant": lambda block, x: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=True), x, use_reentrant=True
    ),
}


@pytest.mark.parametrize("how", AGAIN)
def test_what_a_user_computes_again_draws_the_same(how: str, harness: Harness) -> None:
    once = gradients(harness, lambda block, x: block(x))
    for mine, theirs in zip(gradients(harness, AGAIN[how]), once, strict=True):
        assert torch.equal(mine, theirs)


def test_a_gradient_penalty_computes_again_within_the_forward_pass(harness: Harness) -> None:
    """Draws after it go on where they were."""

    def loss(x: torch.Tensor, *, again: bool) -> torch.Tensor:
        x = x.double().requires_grad_()

        def block(x: torch.Tensor) -> torch.Tensor:
            return (F.dropout(x, 0.5) * torch.randn_like(x)).tanh()

        y = checkpoint(block, x, use_reentrant=False) if again else block(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        return slope + torch.rand_like(x)

    once = harness.run(lambda x: loss(x, again=False), range(4))
    assert torch.equal(once, harness.run(lambda x: loss(x, again=True), range(4)))


def test_numbers_that_backward_cannot_know_are_refused(harness: Harness) -> None:
    def forgetful(block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)

    with pytest.raises(UserError, match="is called in backward, where it can't be told which"):
        gradients(harness, forgetful)


# torch hides it where warnings are no errors
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_is_served(
    backend: str, harness: Harness, functions: ReplacedFunctions
) -> None:
    """Methods of tensors and imported names too, and computed again."""
    once = gradients(harness, lambda block, x: block(x))
    torch._dynamo.reset()
    functions.break_graphs()
    try:
        for again in (lambda block, x: block(x), AGAIN["not reentrant"]):
            compiled = gradients(harness, again, backend)
            for mine, theirs in zip(compiled, once, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    finally:
        torch._dynamo.reset()


def test_what_a_compiler_records_is_not_served(harness: Harness) -> None:
    """Inductor traces patterns of its own in the first step, a permutation's and dropout's among
    them: these are no part of the microbatch.
    """

    def pattern(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x[torch.randperm(len(x))] + torch.rand_like(x).bernoulli_())

    def traced(x: torch.Tensor) -> torch.Tensor:
        nodes = make_fx(pattern, tracing_mode="fake")(x).graph.nodes
        names = [str(node.target) for node in nodes]
        assert {"aten.randperm.default", "aten.rand_like.default"} <= set(names), names
        assert not any("Generator" in name or "opaque" in name for name in names)
        return x

    harness.run(traced, range(4))


class SequenceFirst(nn.Module):
    """Draws whose samples lie in the second dimension, a weight's noise with as many rows as a
    microbatch may have, and a permutation of the samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2)
        self.weight = nn.Parameter(torch.ones(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x.transpose(0, 1))  # [5, samples, 6]
        x = F.dropout(x, 0.3).transpose(0, 1)
        noisy = self.weight + torch.randn_like(self.weight)
        return x @ noisy.t() * torch.rand(1)


def test_what_a_place_draws_for_is_learnt_from_two_sizes(harness: Harness) -> None:
    """By the shapes alone parts of 5, 4 and 1 sample would draw otherwise than the whole."""
    model = seeded(SequenceFirst)
    key_dropout(model, harness.context, SEED)
    ids = list(range(10))
    parts = [ids[:5], ids[5:9], ids[9:]]

    def differs() -> bool:
        whole = harness.run(model, ids)
        together = torch.cat([harness.run(model, part) for part in parts])
        return not torch.allclose(whole, together, rtol=1e-5, atol=1e-6)

    assert differs()
    sites = harness.context.sites
    records: list[list[Draw]] = []
    for part in (ids[:6], ids[:4]):
        with sites.recording() as draws:
            harness.run(model, part)
        records.append(draws)
    sites.learn(*records)
    assert not differs()
    text = Path(__file__).read_text().splitlines()
    lines = [draw.place[-1][1] for draw in records[0] if draw.place[-1][0] == __file__]
    for called in ("self.layer(x", "F.dropout(x", "randn_like(self.weight)", "torch.rand(1)"):
        assert any(called in text[line - 1] for line in lines), called


def test_what_is_not_served_is_recorded_and_its_generator_seen(harness: Harness) -> None:
    own = torch.Generator()

    def draw(x: torch.Tensor) -> torch.Tensor:
        x = x[torch.randperm(len(x))] + torch.rand(len(x), 1, 1, generator=own)
        return x * float(np.random.rand() + random.random())

    sites, records = harness.context.sites, []
    for part in (range(6), range(4)):
        watch = GeneratorStates(CPU)
        with sites.recording() as draws:
            harness.run(draw, part)
        assert watch.changed() == ["torch", "numpy", "Python"]
        records.append(draws)
    sites.learn(*records)
    permutation, own_draw = records[0]
    assert (permutation.number, permutation.shape, own_draw.number) == (0, (6,), -1)
    sites.reseeds_torch = sites.reseeds_host = True
    own.manual_seed(0)
    once = harness.run(draw, range(6))
    own.manual_seed(0)
    assert torch.equal(harness.run(draw, range(6)), once)


def noise(key: int, call: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """The normal numbers of a row [width] or [lines, width], the width even."""
    *outer, width = shape
    lines = [uniform(key, call, width, line) for line in range(math.prod(outer))]
    u = np.stack(lines).reshape(-1, 2)
    radius, angle = np.sqrt(-2 * np.log(1 - u[:, 0])), 2 * math.pi * u[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(shape)


def mask(key: int, call: int, shape: tuple[int, int], p: float) -> NDArray[np.float64]:
    """What a row [lines, width] keeps, scaled; the width is even."""
    lanes = [
        ((pair >> 16 * half) + 2**15) % 2**16 - 2**15
        for line in range(shape[0])
        for element in range(shape[1] // 2)
        for pair in (lane_pair(key, "*", call, element, line),)
        for half in (0, 1)
    ]
    dropped = round(65536 * p)
    kept = (np.array(lanes).reshape(shape) >= dropped - 32768).astype(np.float64)
    return kept * (65536 / (65536 - dropped))


def test_a_plain_loop_with_this_noise_given_has_the_same_losses() -> None:
    """Float64, one device in three rounds, a short tail and a second epoch."""
    sections = {
        "task": f"{HERE}/drawing.py:Plain",
        "batch": {"samples": 12, "per_device": 5},
        "optimizer": {"name": "sgd", "lr": 1e-2, "momentum": 0.0, "clip": 0.0, "weight_decay": 0.0},
        "train": {"steps": 5, "precision": "f64", "seed": 11},
    }
    config = load_document(Document(sections), Tasks()).config
    task = open_task(config, "")
    made = plan(config, MACHINE, task.facts())
    engine = TorchEngine(task, made, config.optimizer, Comm(), [CPU])
    state = engine.init()
    model = copy.deepcopy(state.model)
    feed = Feed(made, made.layout.devices_of(0), task.train_data(), None, engine.stage, prefetch=0)
    losses = [
        engine.step(state, batch, made.lr_at(step), [0] * 4)[1].read().loss for step, batch in feed
    ]
    engine.close()
    assert made.batch.accumulation_steps == 3
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step, ids in enumerate(made.order.ids(range(5))):
        keys = row_keys(11, made.order.position(step).epoch, ids).tolist()
        rows = drawing.Source()[ids]
        x = torch.from_numpy(rows["x"] + 0.1 * np.stack([noise(key, 0, (5, 6)) for key in keys]))
        masks = torch.from_numpy(np.stack([mask(key, 1, (5, 8), 0.3) for key in keys]))
        outputs = model[1](torch.tanh(model[0](x)) * masks).sum((1, 2))  # type: ignore[index]
        loss = (outputs - torch.from_numpy(rows["y"])).square().mean()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-12)
        optimizer.param_groups[0]["lr"] = made.lr_at(step)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def config_of(task: str = "Draws", **sections: Any) -> Config:
    values = {
        "task": f"{HERE}/drawing.py:{task}",
        "batch": {"samples": 10},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 6, "precision": "f64", "eval_every": 3, **sections},
    }
    return load_document(Document(values), Tasks()).config


@pytest.mark.parametrize(
    "layouts", [["fsdp:2"], pytest.param(["single/3", "ddp:3"], marks=pytest.mark.long)]
)
def test_all_that_draws_is_one_curve(layouts: list[str], pool: Pool, tmp_path: Path) -> None:
    """Functions, methods, names, distributions, recurrent layers and attention, in the loss and in
    the model, computed again in backward; on any devices, in any microbatches.
    """
    verdicts = compare(config_of(), layouts, pool, tmp_path, steps=3, near=1e-12)
    assert [verdict.verdict for verdict in verdicts] == ["PASS"] * len(layouts), verdicts


@pytest.mark.long
def test_all_that_draws_has_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    verdicts = compare(config_of(exact=True), ["dp:2", "ddp:3"], pool, tmp_path, steps=3, near=0.0)
    assert [verdict.verdict for verdict in verdicts] == ["PASS"] * 2, verdicts
    assert len({verdict.hash for verdict in verdicts}) == 1
