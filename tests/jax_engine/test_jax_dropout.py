"""nnx.Dropout under jax: torch's masks, which follow the sample."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.protocols import MicroBatch
from samecurve.errors import UserError
from samecurve.jax_engine.dropout import key_dropout
from samecurve.jax_engine.sample_numbers import keyed_arrays, with_numbers
from samecurve.torch_engine.randomness import MicroBatchContext, StagedKeys
from samecurve.torch_engine.randomness.dropout_layers import key_dropout as key_torch_dropout

KEYS = RowKeys(seed=5, epoch=2, step=7, ids=np.array([3, 10**12, 0]))


class Twice(nnx.Module):
    """Drops twice in a forward pass, by one layer."""

    def __init__(self, rate: float, broadcast_dims: tuple[int, ...] = ()) -> None:
        self.drop = nnx.Dropout(rate, broadcast_dims=broadcast_dims, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([self.drop(x), self.drop(x)], axis=-1)


class TorchTwice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.drop = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.drop(x), self.drop(x)], -1)


def by_jax(model: nnx.Module, x: np.ndarray[Any, Any], *, mapped: bool) -> np.ndarray[Any, Any]:
    key_dropout(model, seed=11)
    graph, state = nnx.split(model)

    def call(rows: dict[str, Any]) -> Any:
        return with_numbers(lambda rows: nnx.merge(graph, state)(rows["x"]), rows)

    def of_one_row(row: dict[str, Any]) -> Any:
        return call({name: array[None] for name, array in row.items()})[0]

    rows = keyed_arrays(MicroBatch({"x": x}, keys=KEYS))
    return np.asarray(jax.jit(jax.vmap(of_one_row) if mapped else call)(rows))


def by_torch(layer: nn.Module, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    model, context = TorchTwice(layer).train(), MicroBatchContext(torch.device("cpu"))
    key_torch_dropout(model, context, 11)
    with context.within(StagedKeys(KEYS)):
        values: np.ndarray[Any, Any] = model(torch.from_numpy(x)).numpy()
    return values


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(3, 9), (3, 4, 6, 5)])
def test_masks_are_those_of_torch(shape: tuple[int, ...], dtype: Any, *, mapped: bool) -> None:
    """To the bit, on rows one by one and all at once, in the second call too."""
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    theirs = by_torch(nn.Dropout(0.3), x)
    np.testing.assert_array_equal(by_jax(Twice(0.3), x, mapped=mapped), theirs)
    first, second = np.split(theirs, 2, axis=-1)
    assert (first != second).any()
    assert 0.5 < np.count_nonzero(first) / first.size < 0.9


def test_whole_channels_are_dropped_as_by_torchs_dropout2d() -> None:
    x = np.ones((3, 16, 4, 5), np.float32)
    np.testing.assert_array_equal(
        by_jax(Twice(0.4, (2, 3)), x, mapped=False), by_torch(nn.Dropout2d(0.4), x)
    )


def test_several_neighbouring_rows_belong_to_a_sample() -> None:
    x = np.ones((6, 8), np.float32)
    np.testing.assert_array_equal(by_jax(Twice(0.4), x, mapped=False), by_torch(nn.Dropout(0.4), x))


def test_evaluation_drops_nothing_and_what_cannot_follow_samples_is_refused() -> None:
    with pytest.raises(UserError, match="all samples of a device would share one mask"):
        key_dropout(Twice(0.3, (0,)), 0)
    with pytest.raises(UserError, match=r"\[4, 2\] for 3 samples"):
        by_jax(Twice(0.3), np.ones((4, 2), np.float32), mapped=False)
    model = Twice(0.3)
    key_dropout(model, 0)
    with pytest.raises(UserError, match="no microbatch is in work"):
        model(jnp.ones((3, 2)))
    model.eval()  # type: ignore[no-untyped-call]
    assert (model(jnp.ones((3, 2))) == 1).all()


class Attending(nnx.Module):
    """Attention with dropout of its weights, and a linear layer's worth of heads and groups."""

    def __init__(self, rate: float, *, groups: int = 4, **options: Any) -> None:
        given = {"broadcast_dropout": False, "deterministic": False, "decode": False, **options}
        self.mix = nnx.MultiHeadAttention(
            4, 8, num_kv_heads=groups, dropout_rate=rate, rngs=nnx.Rngs(1), **given
        )

    def __call__(self, x: jax.Array) -> Any:
        return self.mix(x)


def own_attention(*arrays: jax.Array, **_: Any) -> jax.Array:
    return arrays[2]


@pytest.mark.parametrize("groups", [4, 2])
def test_attention_drops_by_sample(groups: int) -> None:
    """The weights' mask follows the sample: rows one by one, all at once and in another order give
    the same; without a mask the layer is flax's own.
    """
    x = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)
    whole = by_jax(Attending(0.4, groups=groups), x, mapped=False)
    np.testing.assert_allclose(
        by_jax(Attending(0.4, groups=groups), x, mapped=True), whole, atol=1e-6
    )
    plain = Attending(0.4, groups=groups)
    plain.eval()  # type: ignore[no-untyped-call]
    undropped = np.asarray(plain(jnp.asarray(x)))
    assert abs(whole - undropped).max() > 0.05
    keyed = Attending(0.4, groups=groups)
    key_dropout(keyed, 0)
    keyed.eval()  # type: ignore[no-untyped-call]
    np.testing.assert_array_equal(keyed(jnp.asarray(x)), undropped)
    rare = by_jax(Attending(1e-9, groups=groups), x, mapped=False)  # one lane of 65,536
    np.testing.assert_allclose(rare, undropped, atol=1e-4)


def test_the_weights_that_attention_keeps_are_scaled_up() -> None:
    """Over many samples the mean of what is attended to stays."""
    keys = RowKeys(seed=5, epoch=2, step=7, ids=np.arange(4000))
    model = Attending(0.5)
    plain = Attending(0.5)
    plain.eval()  # type: ignore[no-untyped-call]
    x = np.random.default_rng(0).normal(size=(1, 5, 8)).astype(np.float32)
    expected = np.asarray(plain(jnp.asarray(x)))[0]
    key_dropout(model, seed=11)
    graph, state = nnx.split(model)
    rows = keyed_arrays(MicroBatch({"x": x.repeat(4000, 0)}, keys=keys))

    def call(rows: dict[str, Any]) -> Any:
        return with_numbers(lambda rows: nnx.merge(graph, state)(rows["x"]), rows)

    np.testing.assert_allclose(np.asarray(jax.jit(call)(rows)).mean(0), expected, atol=0.05)


def test_attention_whose_masks_cannot_follow_samples_is_refused() -> None:
    with pytest.raises(UserError, match="has broadcast_dropout") as caught:
        key_dropout(Attending(0.3, broadcast_dropout=True), 0)
    assert "broadcast_dropout=False" in caught.value.remedy
    with pytest.raises(UserError, match="has an attention_fn of its own"):
        key_dropout(Attending(0.3, attention_fn=own_attention), 0)
    key_dropout(Attending(0.0, broadcast_dropout=True), 0)  # drops nothing
    model = Attending(0.3)
    key_dropout(model, 0)
    with pytest.raises(UserError, match="MultiHeadAttention mix is called, and no microbatch"):
        model(jnp.ones((3, 5, 8)))
