import hashlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint

from samecurve.core.determinism.sample_keys import RowKeys, mix
from samecurve.errors import UserError
from samecurve.torch_engine.randomness import MicroBatchContext, StagedKeys
from samecurve.torch_engine.randomness.dropout_layers import dropout_layers, key_dropout

SEED = 7


def keys(ids: Any, epoch: int = 0) -> StagedKeys:
    return StagedKeys(RowKeys(SEED, epoch, 0, np.asarray(ids)))


def keyed(model: nn.Module, device: str = "cpu") -> tuple[Any, MicroBatchContext]:
    rows = MicroBatchContext(torch.device(device))
    key_dropout(model, rows, SEED)
    return model, rows


def network(again: Callable[..., Any] = lambda block, x: block(x)) -> nn.Module:
    """Per element, per channel, on flattened rows and twice in a row; `again` wraps the middle
    block (activation checkpointing).
    """

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3))
            self.middle = nn.Sequential(
                nn.Dropout1d(0.4), nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)
            )
            self.last = nn.Dropout(0.5, inplace=True)
            self.twice = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = again(self.middle, self.first(x))
            x = self.last(x.flatten(0, 1) * 1.0).view_as(x)
            summed: torch.Tensor = self.twice(x) + 2 * self.twice(x)
            return summed

    torch.manual_seed(0)
    return Net().double()


def run(
    model: nn.Module, rows: MicroBatchContext, ids: Any, epoch: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, input gradient) of the samples with these ids."""
    x = torch.randn(40, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[
        ids
    ].requires_grad_()
    rows.begin(keys(ids, epoch))
    output = model(x)
    return output.detach(), torch.autograd.grad(output.pow(2).sum(), x)[0]


def test_masks_follow_the_samples() -> None:
    """However a batch is split and ordered, each sample's output and gradient are the same to the
    bit; another epoch's are not.
    """
    model, rows = keyed(network())
    ids = np.random.default_rng(0).permutation(40)
    output, gradient = run(model, rows, ids)
    for edges in ((0, 13, 26, 40), (0, 1, 40)):
        found = [run(model, rows, ids[a:b]) for a, b in pairwise(edges)]
        torch.testing.assert_close(
            torch.cat([one for one, _ in found]), output, rtol=1e-14, atol=1e-14
        )
        torch.testing.assert_close(
            torch.cat([one for _, one in found]), gradient, rtol=1e-14, atol=1e-14
        )
    assert not torch.allclose(run(model, rows, ids, epoch=1)[0], output)


def formula(key: int, name: str, call: int, lines: int, width: int) -> list[list[int]]:
    """A row's lanes, [lines, width]: the module's docstring, in Python's own integers."""

    def signed(value: int, bits: int) -> int:
        return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)

    def hashed(value: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            value = (value ^ value >> shift) * factor % (1 << 32)
        return value

    salt = int.from_bytes(hashlib.sha256(f"{SEED}/{name}/{call}".encode()).digest()[:8], "little")
    word = int(mix(np.array([key ^ salt], np.uint64))[0])
    a, b = signed(word | 1, 32), signed(word >> 32, 32)

    def lane(line: int, element: int) -> int:
        place = hashed(element // 2) ^ hashed(1 << 28 | line) ^ hashed(1 << 28)
        x = signed(place * a + b, 32)
        x = signed((x ^ x >> 15) * 0x2C1B3C6D, 32)
        return signed(x >> 16 if element % 2 else x, 16)

    return [[lane(line, element) for element in range(width)] for line in range(lines)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mask_is_that_of_the_formula(dtype: torch.dtype) -> None:
    """An odd number of elements, a second call, a scale that keeps the mean; rounded once, also
    where numbers are narrow.
    """
    model, rows = keyed(nn.Sequential(nn.Identity(), nn.Dropout(0.3)))
    rows.begin(keys([3, 10**12]))
    x = torch.rand(2, 3, 7, dtype=dtype) + 1
    for call in (0, 1):
        output = model(x)
        lanes = [formula(int(key), "1", call, 3, 7) for key in keys([3, 10**12]).rows.values]
        expected = torch.tensor(lanes) >= round(65536 * 0.3) - 32768
        scale = 65536 / (65536 - round(65536 * 0.3))
        assert torch.equal(
            output,
            (
                (x.double() * expected * scale).to(dtype)
                if dtype != torch.float32
                else x * expected * scale
            ),
        )
    rows.begin(None)
    with pytest.raises(RuntimeError, match="begin"):
        model(x)


def test_a_mask_is_the_same_whatever_its_row_is_padded_to() -> None:
    """As attention weights are: [samples, heads, length, length]."""
    model, rows = keyed(nn.Dropout(0.4))
    rows.begin(keys([3, 4, 5]))
    long = model(torch.ones(3, 2, 9, 9))
    rows.begin(keys([4, 5]))
    assert torch.equal(model(torch.ones(2, 2, 6, 6)), long[1:, :, :6, :6])


@pytest.mark.gpu
def test_a_gpu_draws_the_masks_of_a_cpu() -> None:
    """Outputs and gradients to the last bit, in float32 and bfloat16."""
    found = []
    for device in ("cpu", "cuda:0"):
        for dtype in (torch.float32, torch.bfloat16):
            model, rows = keyed(nn.Dropout(0.3), device)
            rows.begin(keys(range(4)))
            x = (
                (torch.rand(4, 3, 7, generator=torch.Generator().manual_seed(0)) + 1)
                .to(dtype)
                .to(device)
                .requires_grad_()
            )
            output = model(x)
            found.append([output.cpu(), torch.autograd.grad(output.sum(), x)[0].cpu()])
    for cpu, gpu in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(cpu, gpu, strict=True))


def masks(count: int, epoch: int = 0) -> NDArray[np.float64]:
    """What three layers keep of `count` samples of 999 elements, p = 0.1, less its mean: [layer,
    sample, element].
    """
    model, rows = keyed(nn.ModuleList([nn.Dropout(0.1) for _ in range(3)]))
    rows.begin(keys(np.arange(count), epoch))
    found: NDArray[np.float64] = (
        torch.stack([layer(torch.ones(count, 999)) for layer in model]).numpy().astype(np.float64)
    )
    found[found > 0] = 1
    return found - (1 - round(6553.6) / 65536)


def test_masks_are_as_good_as_random() -> None:
    """Rate within 4 sigma overall, in every row, element and layer (5 for the worst of thousands);
    no correlation of layers, samples, epochs, neighbours, lanes or quadruples.
    """
    found, other = masks(2000), masks(2000, epoch=1)
    spread = np.sqrt(0.1 * 0.9)

    def sigmas(values: NDArray[np.float64], factors: int, axis: Any = None) -> Any:
        return (
            np.abs(values.mean(axis) * np.sqrt(values.size / values.mean(axis).size)).max()
            / spread**factors
        )

    assert sigmas(found, 1) < 4
    assert sigmas(found, 1, (1, 2)) < 4
    assert sigmas(found, 1, (0, 2)) < 5
    assert sigmas(found, 1, (0, 1)) < 5
    pairs = {
        "layers": found[0] * found[1],
        "samples": found[:, 1:] * found[:, :-1],
        "epochs": found * other,
        "lanes": found[:, :, :-1:2] * found[:, :, 1::2],
        "neighbours": found[:, :, 1:-1:2] * found[:, :, 2::2],
        "rows of 27": found[:, :, 27:] * found[:, :, :-27],
    }
    assert {
        name: sigmas(values, 2) for name, values in pairs.items() if sigmas(values, 2) >= 4
    } == {}
    corners = found[:, 1:, 1:] * found[:, 1:, :-1] * found[:, :-1, 1:] * found[:, :-1, :-1]
    assert sigmas(corners, 4) < 4
    alike = found[0] @ found[0].T / (999 * spread**2) * np.sqrt(999)
    assert np.abs(alike - np.diag(np.diag(alike))).max() < 7


def test_channels_and_flattened_rows() -> None:
    """A channel is kept or dropped whole; rows of one sample, put side by side, have the mask that
    they had apart.
    """
    model, rows = keyed(nn.Dropout2d(0.5))
    rows.begin(keys(range(4)))
    whole = model(torch.ones(4, 64, 3, 5))
    assert torch.equal(whole, whole[:, :, :1, :1].expand_as(whole))
    assert set(whole.unique().tolist()) == {0.0, 2.0}
    model, rows = keyed(nn.Dropout(0.5))
    rows.begin(keys(range(4)))
    apart = model(torch.ones(4, 6, 8))
    rows.begin(keys(range(4)))
    assert torch.equal(model(torch.ones(24, 8)).view(4, 6, 8), apart)
    rows.begin(keys(range(2)))
    assert torch.equal(
        model(torch.ones(2, 3, 8)), apart[:2, :3]
    )  # a shorter sequence has the beginning of the longer one's mask


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_computed_again_has_the_same_masks(*, reentrant: bool) -> None:
    def again(block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=reentrant)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        model, rows = keyed(model)
        output, _ = run(model, rows, range(8)) if not reentrant else (None, None)
        rows.begin(keys(range(8)))
        torch.autograd.backward(model(torch.ones(8, 5, 6, dtype=torch.float64)).pow(2).sum())
        return [
            *([] if output is None else [output]),
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]

    for mine, theirs in zip(gradients(network(again)), gradients(network()), strict=True):
        assert torch.equal(mine, theirs)


def test_several_calls_computed_again_are_refused() -> None:
    """Which of its calls is computed again can't be told: an error, and not another mask."""
    block, rows = keyed(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
    rows.begin(keys(range(2)))
    x = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        x = checkpoint(block, x, use_reentrant=False)
    with pytest.raises(UserError, match="1 is called 2 times in a forward pass and computed again"):
        torch.autograd.backward(x.sum())


def test_inputs_that_cannot_follow_the_samples_are_refused() -> None:
    model, rows = keyed(nn.ModuleDict({"a": nn.Dropout(0.5), "b": nn.Dropout2d(0.5)}))
    rows.begin(keys(range(4)))
    with pytest.raises(UserError, match=r"Dropout a is given \[6, 3\] for 4 samples"):
        model["a"](torch.ones(6, 3))
    with pytest.raises(UserError, match=r"Dropout2d b drops whole channels and is given \[4, 3\]"):
        model["b"](torch.ones(4, 3))
    assert torch.equal(model.eval()["a"](torch.ones(6, 3)), torch.ones(6, 3))


def test_names_of_what_draws_and_of_what_is_keyed() -> None:
    class Own(nn.Dropout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    model = nn.ModuleDict(
        {
            "a": nn.Dropout(0.1),
            "b": nn.Dropout(0.0),
            "c": nn.AlphaDropout(0.2),
            "d": nn.LSTM(4, 4, num_layers=2, dropout=0.1, batch_first=True),
            "e": Own(0.3),
            "f": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True),
            "g": nn.FeatureAlphaDropout(0.1),
            "h": nn.Dropout3d(1.0),
        }
    )
    own = ("a", "f.dropout", "f.dropout1", "f.dropout2", "h")
    assert dropout_layers(model) == (
        *("a", "c", "d", "e", "f.self_attn", "f.dropout", "f.dropout1", "f.dropout2", "g", "h"),
    )
    rows = MicroBatchContext(torch.device("cpu"))
    assert key_dropout(model, rows, SEED) == key_dropout(model, rows, SEED) == own
    assert isinstance(model["a"], nn.Dropout)
    rows.begin(keys(range(2)))
    assert not model["h"](torch.ones(2, 3, 4, 1, 1)).any()
