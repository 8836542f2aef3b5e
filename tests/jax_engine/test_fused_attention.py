"""Attention under jax: the plan's choice of a kernel, and the form that keeps scores."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan as make_plan
from samecurve.jax_engine.attention import (
    FusibleAttention,
    attend_with_scores,
    attention_head,
    fuse_attention,
)
from tiny import FACTS, config_of


def inputs(groups: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    random = np.random.default_rng(0)
    shapes = ((3, 7, 4, 8), (3, 7, groups, 8), (3, 7, groups, 8))
    query, key, value = (jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)
    return query, key, value


def before(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool) -> jax.Array:
    """The equations, written with heads first, as the models had them."""
    query, key, value = (jnp.swapaxes(array, 1, 2) for array in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(array, repeats, axis=1) for array in (key, value))
    scores = query @ jnp.swapaxes(key, 2, 3) / query.shape[-1] ** 0.5
    if causal:
        places = np.arange(query.shape[2])
        scores = jnp.where(places[:, None] >= places, scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.swapaxes(weights / weights.sum(-1, keepdims=True) @ value, 1, 2)


@pytest.mark.parametrize(("groups", "causal"), [(4, False), (2, True)])
def test_the_form_with_scores_is_that_of_before(groups: int, *, causal: bool) -> None:
    """Outputs and gradients in float64; and jax's own function in float32, whose layout cuDNN's
    kernel shares.
    """
    with jax.enable_x64(True):
        wide = inputs(groups, jnp.float64)
        weights = np.random.default_rng(1).normal(size=wide[0].shape)

        def looked(function: Any) -> Any:
            def weighed(*arrays: jax.Array) -> Any:
                return (function(*arrays, causal=causal) * weights).sum()

            return jax.jit(jax.value_and_grad(weighed, argnums=(0, 1, 2)))(*wide)

        for one, other in zip(
            *map(jax.tree.leaves, (looked(attend_with_scores), looked(before))), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
        assert attend_with_scores(*wide, causal=causal).dtype == np.float64
    narrow = inputs(groups, jnp.float32)
    theirs = jax.nn.dot_product_attention(*narrow, is_causal=causal, implementation="xla")
    np.testing.assert_allclose(
        attend_with_scores(*narrow, causal=causal), theirs, rtol=1e-5, atol=1e-6
    )


class Two(nnx.Module):
    def __init__(self) -> None:
        self.parts = nnx.List([FusibleAttention(), FusibleAttention()])
        for part, size in zip(self.parts, (16, 32), strict=True):
            part.size = size


def test_every_attention_of_a_model_is_fused_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused module asks jax for cuDNN's kernel, which only a GPU has."""
    model = Two()
    assert attention_head(model) == 32
    assert attention_head(nnx.List([])) is None
    query, key, value = inputs(4, jnp.bfloat16)
    assert model.parts[0].attend(query, key, value).dtype == jnp.bfloat16
    fuse_attention(model)
    asked: list[Any] = []

    def kernel(*arrays: jax.Array, **options: Any) -> jax.Array:
        asked.append(options)
        return arrays[0]

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    for part in model.parts:
        part.attend(query, key, value, causal=True)
    assert asked == [{"is_causal": True, "implementation": "cudnn"}] * 2


def planned(
    *, kind: str = "cuda", capability: str = "9.0", head: int | None = 64, **train: Any
) -> Plan:
    memory = 80 << 30
    gpu = Device(kind=kind, index=0, name="a GPU", memory=memory, capability=capability)  # type: ignore[arg-type]
    machine = Machine(devices=(gpu,), links=(), host_bytes=memory, cores=8)
    engine = "jax" if kind != "torch" else "torch"
    config = config_of(
        {
            "task": "vision",
            "engine": engine,
            "batch": {"samples": 10},
            "train": {"steps": 2, "precision": "bf16", **train},
            "devices": {"use": "cpu" if kind == "cpu" else "auto"},
        }
    )
    return make_plan(config, machine, FACTS.having(attention_head=head))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "cuDNN's fused kernel (bf16, heads of 64)"),
        ({"precision": "f32"}, "is for bf16 and f16, not f32"),
        ({"capability": "7.5"}, "from compute capability 8.0 on, not a GPU"),
        ({"head": 20}, "heads of a multiple of 8 up to 128, not 20"),
        ({"head": 256}, "heads of a multiple of 8 up to 128, not 256"),
        ({"exact": True}, "train.exact keeps to kernels whose bits were compared"),
        ({"kind": "cpu"}, "is for NVIDIA GPUs"),
    ],
)
def test_the_plan_says_which_kernel_and_why(given: dict[str, Any], says: str) -> None:
    plan = planned(**given)
    assert says in plan.reasons["attention"]
    assert ("fused_attention" in plan.features) is (not given)
    assert Plan.from_json(plan.to_json()).compute == plan.compute


def test_a_model_without_attention_says_nothing() -> None:
    plan = planned(head=None)
    assert "attention" not in plan.reasons
    assert "fused_attention" not in plan.features
