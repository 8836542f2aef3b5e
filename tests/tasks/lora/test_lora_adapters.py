"""Adapters in models of pictures: where they are put, how they begin, and what they come to."""

from collections.abc import Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from tiny_image_models import TARGETS, build, run, train
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.model.model_builder import FirstValues
from samecurve.torch_engine.model.weight_files import WeightArray
from samecurve_products.lora.adapter import (
    first_values,
    import_peft,
    merged,
    peft_config,
    with_adapter_names,
)
from samecurve_products.lora.image_models import (
    adapted_layers,
    add_adapter,
    find_candidates,
    packings,
    possible_adapters,
)
from samecurve_products.lora.names import BASE, MAGNITUDE, OWN, A, B
from samecurve_products.lora.quantized import PackedArrays, unpacked
from samecurve_products.lora.sections import Kind, Quantize
from samecurve_products.pictures.diffusion.sections import Adapter

needs_library = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("sdxl", "flux") for kind in get_args(Kind)),
        ("sd15", "lora"),
        *(pytest.param("sd15", kind, marks=pytest.mark.long) for kind in ("dora", "lokr")),
    ],
)
def test_it_begins_as_the_plain_model_and_is_merged_into_one(name: str, kind: Kind) -> None:
    """Linear layers and convolutions, rank 3 and a factor of 1.5; half of it is seen."""
    model = build(name)
    before = run(name, model)
    adapter = Adapter(kind=kind, rank=3, alpha=4.5, target=TARGETS[name])
    layers = adapted_layers(model, adapter)
    add_adapter(model, adapter)
    assert torch.equal(run(name, model.double().eval()), before)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {_layer_of(name) for name in trained} == set(layers)
    assert all(name.endswith(OWN) for name in trained)

    train(model)
    expected = run(name, model)
    assert float((expected - before).abs().max()) > 1e-2
    plain = build(name)
    plain.load_state_dict(merged(model.state_dict(), adapter))
    torch.testing.assert_close(run(name, plain), expected, rtol=1e-12, atol=1e-12)
    half = Adapter(kind=kind, rank=3, alpha=2.25, target=TARGETS[name])
    plain.load_state_dict(merged(model.state_dict(), half))
    assert float((run(name, plain) - expected).abs().max()) > 1e-3


def _layer_of(name: str) -> str:
    return name.removesuffix(next(own for own in OWN if name.endswith(own)))


class Layers(nn.Module):
    """Each sort of layer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 18)
        self.wide = nn.Conv2d(6, 10, 3, stride=2, padding=1)
        self.point = nn.Conv2d(6, 8, 1, bias=False)

    def forward(self, rows: torch.Tensor, picture: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.linear(rows), self.wide(picture), self.point(picture)


@pytest.mark.parametrize(("kind", "rank"), [("lora", 2), ("dora", 2), ("lokr", 1), ("lokr", 64)])
def test_layers_and_merged_weights_are_those_of_peft(kind: Kind, rank: int) -> None:
    """LoKr with a factor w2 in two matrices, and in one."""
    torch.manual_seed(0)
    model: Any = Layers().double()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows, picture = torch.randn(5, 12).double(), torch.randn(2, 6, 9, 9).double()
    adapter = Adapter(kind=kind, rank=rank, alpha=3 * rank, target=["linear", "wide", "point"])
    add_adapter(model, adapter)
    train(model)
    model.double().eval()
    here = merged(model.state_dict(), adapter)
    said = model(rows, picture)
    for layer in ("linear", "wide", "point"):
        model.get_submodule(layer).merge()
        theirs = model.get_submodule(layer).base_layer.weight
        torch.testing.assert_close(here[f"{layer}.weight"], theirs, rtol=1e-12, atol=1e-12)
        assert float((theirs - weights[f"{layer}.weight"]).abs().max()) > 1e-2
    for ours, theirs in zip(said, model(rows, picture), strict=True):  # peft's, once merged
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_lokr_draws_no_number_for_a_batch_while_it_trains() -> None:
    """peft's own layers do: their curve would depend on the microbatches."""
    import_peft()
    from peft import inject_adapter_in_model

    rows, picture = torch.randn(5, 12), torch.randn(2, 6, 9, 9)
    adapter = Adapter(kind="lokr", rank=2, target=["linear", "wide"])
    drawn = []
    for add in (
        add_adapter,
        lambda model, of: inject_adapter_in_model(peft_config(of, of.target), model),
    ):
        model = Layers().train()
        add(model, adapter)
        state = torch.get_rng_state()
        model(rows, picture)
        drawn.append(not torch.equal(torch.get_rng_state(), state))
    assert drawn == [False, True]
    with pytest.raises(ValidationError, match="dropout is of kind lora and dora"):
        Adapter(kind="lokr", dropout=0.1)


def _first_values(target: list[str], kind: Kind) -> dict[str, torch.Tensor]:
    """Those of a seed, of a model that was built without values."""
    adapter = Adapter(kind=kind, rank=3, target=target)

    def model() -> nn.Module:
        built = Layers()
        add_adapter(built, adapter)
        return built

    def init_module(_: nn.Module, module: Any) -> None:
        first_values(module, lambda plain: plain.reset_parameters())

    task: Any = SimpleNamespace(model=model, init_module=init_module, initial=lambda *_: None)
    first = FirstValues(task, 5, lambda _: None)
    built = first.build()
    assert all(parameter.is_meta for parameter in built.parameters())
    first.materializer(built, torch.device("cpu"))(built)
    return dict(built.state_dict())


@pytest.mark.parametrize("kind", get_args(Kind))
def test_first_values_follow_from_the_seed_and_the_layer_s_name(kind: Kind) -> None:
    """Whatever other layers have an adapter, and whatever was drawn before."""
    one = _first_values(["linear", "wide", "point"], kind)
    torch.rand(3)
    other = _first_values(["wide"], kind)
    own = [name for name in other if name.endswith(OWN)]
    assert own
    for name in own:
        assert torch.equal(one[name], other[name])
    assert all(float(other[name].abs().max()) > 0 for name in own if name.endswith(A))
    zero = [name for name in own if name.endswith((B, ".lokr_w1.default"))]
    assert len(zero) == 1
    assert not other[zero[0]].any()
    if kind == "dora":
        norms = one[f"wide{BASE}weight"].flatten(1).norm(dim=1)
        torch.testing.assert_close(one[f"wide{MAGNITUDE}"].flatten(), norms)


def test_a_base_from_files_has_dora_s_magnitudes() -> None:
    """Of a convolution too: those that the model gives itself from the same weights."""
    model = Layers()
    adapter = Adapter(kind="dora", target=["linear", "wide"])
    layers = adapted_layers(model, adapter)
    arrays = {
        name: WeightArray("float32", tuple(t.shape), t.clone().numpy)
        for name, t in model.state_dict().items()
    }
    found = with_adapter_names(layers, adapter, arrays, arrays)
    add_adapter(model, adapter)
    own = {n: t for n, t in model.state_dict().items() if not n.endswith((A, B))}
    assert set(found) == set(own)
    for name, tensor in own.items():
        assert found[name].shape == tuple(tensor.shape)
        torch.testing.assert_close(torch.from_numpy(found[name].read()), tensor)


def test_words_names_and_patterns_choose_layers() -> None:
    flux, unet = build("flux"), build("sdxl")
    products = {"to_q", "to_k", "to_v", "to_out.0"}
    added = {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}

    def ends(model: nn.Module, target: str | list[str]) -> set[str]:
        names = adapted_layers(model, Adapter(target=target))
        return {name.partition("attn")[2].partition(".")[2] or name for name in names}

    assert ends(flux, "attention") == products | added
    assert ends(unet, "attention") == products
    assert len(adapted_layers(flux, Adapter(target="all-linear"))) == 20
    assert "conv_in" not in adapted_layers(unet, Adapter(target="all-linear"))
    assert list(adapted_layers(flux, Adapter(target=r"proj_out"))) == [
        "single_transformer_blocks.0.proj_out",
        "proj_out",
    ]
    with_group = adapted_layers(unet, Adapter(target=["attention", "conv_in"]))
    assert len(with_group) == 1 + len(adapted_layers(unet, Adapter()))
    for target, remedy in {"to_qq": "to_q", "nothing": "attention, all-linear, or some of"}.items():
        with pytest.raises(UserError, match=f"target {target} names no linear layer or") as refused:
            adapted_layers(unet, Adapter(target=[target]))
        assert remedy in refused.value.remedy
    with pytest.raises(UserError, match="attention names no linear layer or convolution"):
        adapted_layers(Layers(), Adapter())
    assert possible_adapters(flux, Adapter(rank=2)) == {"model.adapter.rank=2": 2 * 11 * 32}


def test_a_pattern_of_a_whole_name_takes_no_layer_that_ends_so() -> None:
    """peft takes a name in a list for the end of a name too."""
    model = build("flux")
    add_adapter(model, Adapter(target=r"proj_ou[t]"))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {_layer_of(name) for name in trained} == {"proj_out"}


@pytest.mark.parametrize(
    ("quantize", "kind"),
    [
        *(("bf16", kind) for kind in get_args(Kind)),
        pytest.param("4bit", "lora", marks=needs_library),
        pytest.param("8bit", "lokr", marks=needs_library),
    ],
)
def test_a_packed_base_computes_with_what_its_weights_are_worth(
    kind: Kind, quantize: Quantize
) -> None:
    """The linear layers of the blocks alone; files are packed to the same codes."""
    plain = build("flux", torch.float32)
    arrays = {
        name: WeightArray("float32", tuple(t.shape), t.clone().numpy)
        for name, t in plain.state_dict().items()
    }
    adapter = Adapter(kind=kind, rank=3, target="attention")
    layers, packed = adapted_layers(plain, adapter), packings(plain, quantize)
    packer = PackedArrays(packed)
    rounded = packer.rounded(arrays)
    from_files = packer.packed(with_adapter_names(layers, adapter, arrays, rounded), BASE)

    model = plain
    add_adapter(model, adapter, quantize)
    train(model)
    model = model.float()
    state = model.state_dict()
    for name, array in from_files.items():
        if not name.endswith(MAGNITUDE):
            assert torch.equal(torch.from_numpy(array.read()), state[name])
    assert set(packed) == set(find_candidates(build("flux")).groups["all-linear"])

    worth = build("flux", torch.float32)
    worth.load_state_dict(merged(unpacked(state, packed, BASE), adapter))
    torch.testing.assert_close(run("flux", model), run("flux", worth), rtol=1e-5, atol=1e-5)
    for name in packed:  # and that is something else
        assert not (rounded[f"{name}.weight"].read() == arrays[f"{name}.weight"].read()).all()


def test_a_convolution_that_peft_can_t_stand_for_is_no_target() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2))
    model.append(nn.Conv2d(4, 4, 3, padding_mode="circular", padding=1))
    assert not find_candidates(model).layers
    with pytest.raises(UserError, match="no linear layers"):
        adapted_layers(model, Adapter(target="all-linear"))
