"""Files of adapters: what diffusers and front ends read of ours, and what we read of theirs."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from tiny_image_models import COMPONENTS, TARGETS, adapter_arrays, build, run, train

from samecurve.errors import UserError
from samecurve.run.weights.first_adapter import is_adapter
from samecurve.torch_engine.model.weight_files import WeightArray, read_weights
from samecurve_products.lora.adapter import merged
from samecurve_products.lora.file_metadata import AboutFile, file_metadata
from samecurve_products.lora.file_names import FileNames, find_file_names
from samecurve_products.lora.file_reading import read_adapter
from samecurve_products.lora.image_models import add_adapter
from samecurve_products.lora.layouts import (
    DIFFUSERS_FILE,
    Layout,
    file_tensors,
    loading_line,
    reader_notes,
)
from samecurve_products.lora.names import BASE, MAGNITUDE, B
from samecurve_products.lora.sections import Kind
from samecurve_products.pictures.diffusion.sections import Adapter


@dataclass(frozen=True)
class Trained:
    """A model with an adapter that is not zero."""

    name: str
    adapter: Adapter
    model: Any
    names: FileNames

    @classmethod
    def of(cls, name: str, **fields: Any) -> "Trained":
        model = build(name)
        names = find_file_names(model, COMPONENTS[name])
        adapter = Adapter(**{"rank": 3, "alpha": 4.5, "target": TARGETS.get(name), **fields})
        add_adapter(model, adapter)
        train(model)
        return cls(name, adapter, model.double().eval(), names)

    def tensors(self, layout: Layout) -> dict[str, torch.Tensor]:
        return file_tensors(self.model.state_dict(), self.adapter, self.names, layout)

    def read(self, arrays: Mapping[str, torch.Tensor], **metadata: str) -> Any:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        return read_adapter(stored(arrays), self.adapter, shapes, self.names, metadata)


def stored(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: WeightArray(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.clone().numpy)
        for name, t in tensors.items()
    }


def pipeline(name: str, model: Any) -> Any:
    """A pipeline of diffusers with this model alone."""
    import diffusers

    library: Any = diffusers
    kinds = {
        "sd15": library.StableDiffusionPipeline,
        "sdxl": library.StableDiffusionXLPipeline,
        "flux": library.FluxPipeline,
        "sd3": library.StableDiffusion3Pipeline,
        "flux2": library.Flux2KleinPipeline,
        "z_image": library.ZImagePipeline,
    }
    parts: dict[str, Any] = dict.fromkeys(
        ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    )
    if name == "sd3":
        parts |= dict.fromkeys(("text_encoder_3", "tokenizer_3"))
    if name in ("flux2", "z_image"):
        parts = {part: None for part in parts if not part.endswith("_2")}
    if name == "sd15":
        parts = {part: None for part in parts if not part.endswith("_2")}
        parts |= {"safety_checker": None, "feature_extractor": None}
        parts["requires_safety_checker"] = False
    scheduler = library.DDIMScheduler(steps_offset=1, clip_sample=False)
    if name in ("sd3", "flux2", "z_image"):
        scheduler = library.FlowMatchEulerDiscreteScheduler()
    return kinds[name](scheduler=scheduler, **parts, **{COMPONENTS[name]: model})


@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_diffusers_loads_what_was_trained(name: str, layout: Layout, tmp_path: Path) -> None:
    """By its own conversion of names; a halved alpha is seen."""
    target = "attention" if name == "flux" and layout == "kohya" else TARGETS[name]
    trained = Trained.of(name, target=target)
    expected = run(name, trained.model)

    def loaded(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        save_file(tensors, tmp_path / DIFFUSERS_FILE)
        model = build(name)
        pipeline(name, model).load_lora_weights(tmp_path)
        return run(name, model.double())

    tensors = {name: tensor.contiguous() for name, tensor in trained.tensors(layout).items()}
    torch.testing.assert_close(loaded(tensors), expected, rtol=1e-12, atol=1e-12)
    factors = (".alpha",) if layout == "kohya" else (".lora_B.weight",)
    halved = {n: t / 2 if n.endswith(factors) else t for n, t in tensors.items()}
    assert float((loaded(halved) - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_diffusers_loads_other_kinds_in_its_own_layout(kind: Kind) -> None:
    """LoKr of linear layers alone: it refuses to load one of convolutions."""
    trained = Trained.of("flux", kind=kind, rank=2)
    model = build("flux")
    model.load_lora_adapter(trained.tensors("diffusers"), prefix="transformer")
    expected = run("flux", trained.model)
    torch.testing.assert_close(run("flux", model.double()), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "rank"), [("lora", 2), ("dora", 2), ("lokr", 1), ("lokr", 64)])
def test_front_ends_compute_the_same_weights(kind: Kind, rank: int) -> None:
    """By the formula that they have in common: alpha counts where a factor is in two matrices."""
    trained = Trained.of("sdxl", kind=kind, rank=rank, alpha=3.0)
    file, state = trained.tensors("kohya"), trained.model.state_dict()
    for name, expected in merged(state, trained.adapter).items():
        layer, _, leaf = name.rpartition(".")
        word = trained.names.words.get(layer, "")
        if leaf != "weight" or f"{word}.alpha" not in file:
            continue
        base = state[f"{layer}{BASE}weight"]
        weight = base + front_end_change(file, word, base.shape)
        if kind == "dora":
            scale = file[f"{word}.dora_scale"]
            assert scale.shape == (len(base), *(1 for _ in base.shape[1:]))
            norms = weight.flatten(1).norm(dim=1).view(scale.shape)
            weight = weight * scale / norms
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)


def front_end_change(
    file: Mapping[str, torch.Tensor], word: str, shape: tuple[int, ...]
) -> torch.Tensor:
    alpha = float(file[f"{word}.alpha"])
    if f"{word}.lora_up.weight" in file:
        up, down = file[f"{word}.lora_up.weight"], file[f"{word}.lora_down.weight"]
        return (up.flatten(1) @ down.flatten(1)).view(shape) * alpha / len(down)
    factor, w2 = 1.0, file.get(f"{word}.lokr_w2")
    if w2 is None:
        first, second = file[f"{word}.lokr_w2_a"], file[f"{word}.lokr_w2_b"]
        factor, w2 = alpha / len(second), first @ second
    product: torch.Tensor = torch.kron(file[f"{word}.lokr_w1"], w2.flatten(1))
    return product.view(shape) * factor


@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sdxl", "lora"),
        ("sd15", "dora"),
        ("flux", "lokr"),
        pytest.param("sdxl", "dora", marks=pytest.mark.long),
        pytest.param("sdxl", "lokr", marks=pytest.mark.long),
    ],
)
def test_a_file_of_ours_is_read_back(name: str, kind: Kind, layout: Layout, tmp_path: Path) -> None:
    trained = Trained.of(name, kind=kind)
    file = {name: tensor.contiguous() for name, tensor in trained.tensors(layout).items()}
    save_file(file, tmp_path / "a.safetensors")
    arrays, _ = read_weights(tmp_path / "a.safetensors")
    assert is_adapter(list(arrays))
    shapes = {name: tuple(t.shape) for name, t in trained.model.state_dict().items()}
    found = read_adapter(arrays, trained.adapter, shapes, trained.names)
    expected = adapter_arrays(trained.model)
    stated = layout == "kohya"  # the other layout has no place for alpha
    assert found.notes == [] if stated else "the file states no alpha" in found.notes[0]
    assert set(found.arrays) == set(expected)
    for own, tensor in expected.items():
        assert found.arrays[own].shape == tuple(tensor.shape)
        values = torch.from_numpy(found.arrays[own].read())
        # of the factor 1.5, which is multiplied and divided, a rounding may be left
        torch.testing.assert_close(values, tensor, rtol=1e-15, atol=0)


def test_names_are_those_that_front_ends_read() -> None:
    flux, sdxl, sd15 = (find_file_names(build(n), COMPONENTS[n]) for n in ("flux", "sdxl", "sd15"))
    block = "attentions.0.transformer_blocks.0.attn1.to_q"
    word = "transformer_blocks_0_attn1_to_q"
    assert flux.words["transformer_blocks.0.attn.to_q"] == (
        "lora_transformer_transformer_blocks_0_attn_to_q"
    )
    assert sd15.words[f"down_blocks.1.{block}"] == f"lora_unet_down_blocks_1_attentions_0_{word}"
    written = {
        f"down_blocks.1.{block}": f"input_blocks_3_1_{word}",
        f"mid_block.{block}": f"middle_block_1_{word}",
        f"up_blocks.0.{block}": f"output_blocks_0_1_{word}",
        "up_blocks.0.upsamplers.0.conv": "output_blocks_1_2_conv",
        "down_blocks.0.downsamplers.0.conv": "input_blocks_2_0_op",
        "mid_block.resnets.1.conv2": "middle_block_2_out_layers_3",
        "up_blocks.1.resnets.1.conv_shortcut": "output_blocks_3_0_skip_connection",
        "down_blocks.0.resnets.0.time_emb_proj": "input_blocks_1_0_emb_layers_1",
        "add_embedding.linear_2": "label_emb_0_2",
        "conv_out": "out_2",
    }
    assert {layer: sdxl.words[layer] for layer in written} == {
        layer: f"lora_unet_{name}" for layer, name in written.items()
    }
    text = find_file_names(build("sd15"), "text_encoder_2")
    assert text.words["conv_in"] == "lora_te2_conv_in"
    first = find_file_names(build("sd15"), "text_encoder", "lora_te1_")
    assert first.words["conv_in"] == "lora_te1_conv_in"


def test_layers_that_lie_in_one_elsewhere_are_read_as_diffusers_reads_them() -> None:
    """A Flux adapter with the names of the model's first code, as kohya's trainer writes it.

    Diffusers reads no linear1 of another size than Flux has: its rows are looked at by themselves.
    """
    import diffusers

    trained = Trained.of("flux", target=r".*attn\.(add_|to_)[qkv].*|.*proj_mlp|.*ff\.net\.2")
    random = torch.Generator().manual_seed(4)

    def adapter_of(
        word: str, outputs: int, inputs: int, alpha: float = 3.0
    ) -> dict[str, torch.Tensor]:
        down, up = (
            torch.randn(3, inputs, generator=random),
            torch.randn(outputs, 3, generator=random),
        )
        word = f"lora_unet_{word}"
        arrays = {f"{word}.lora_down.weight": down, f"{word}.lora_up.weight": up}
        return {**arrays, f"{word}.alpha": torch.tensor(alpha)}

    file = adapter_of("double_blocks_0_img_attn_qkv", 48, 16)
    file |= adapter_of("double_blocks_0_txt_attn_qkv", 48, 16)
    file |= adapter_of("double_blocks_0_img_mlp_2", 16, 64)
    single = adapter_of("single_blocks_0_linear1", 3 * 16 + 64, 16, 1.5)
    found = trained.read({**file, **single})
    (note,) = found.notes
    assert "several factors (0.5 to 1), and here they have one, 1.5" in note
    up = next(t for name, t in single.items() if "up" in name)
    block = "single_transformer_blocks.0."
    for layer, rows in {"attn.to_k": up[16:32], "proj_mlp": up[48:]}.items():
        values = torch.from_numpy(found.arrays[f"{block}{layer}{B}"].read())
        torch.testing.assert_close(values, rows / 3)  # its factor is 0.5, of this adapter 1.5

    for name, tensor in trained.model.named_parameters():
        if name in found.arrays and not name.startswith("single"):
            tensor.data = torch.from_numpy(found.arrays[name].read()).double()
        elif name.endswith(B):
            tensor.data.zero_()
    state, *_ = diffusers.FluxPipeline.lora_state_dict(dict(file), return_alphas=True)
    model = build("flux")
    model.load_lora_adapter(state, prefix="transformer")
    expected = run("flux", model.double())
    torch.testing.assert_close(run("flux", trained.model), expected, rtol=1e-6, atol=1e-6)


def test_names_and_factors_of_other_tools_are_read() -> None:
    trained = Trained.of("sd15", target=["to_q", "to_out.0"], alpha=6.0)
    expected = adapter_arrays(trained.model)

    def assert_read(file: Mapping[str, torch.Tensor], **metadata: str) -> None:
        found = trained.read(file, **metadata)
        assert set(found.arrays) == set(expected)
        for name, tensor in expected.items():
            values = torch.from_numpy(found.arrays[name].read())
            torch.testing.assert_close(values, tensor, rtol=1e-14, atol=0)

    plain = trained.tensors("diffusers")
    assert_read({name.removeprefix("unet."): tensor for name, tensor in plain.items()})
    parts = {".to_q.": ".processor.to_q_", ".to_out.0.": ".processor.to_out_"}
    parts |= {"lora_A": "lora.down", "lora_B": "lora.up"}
    old = dict(plain)  # of diffusers, of the year 2023
    for new_part, old_part in parts.items():
        old = {name.replace(new_part, old_part): tensor for name, tensor in old.items()}
    assert_read(old)
    described = {n: t / 2 if "lora_B" in n else t for n, t in plain.items()}
    config = {"unet.r": 3, "unet.lora_alpha": 3, "unet.alpha_pattern": {"to_[qo].*": 6}}
    assert_read(described, lora_adapter_metadata=json.dumps(config))
    with pytest.raises(UserError, match="lora_adapter_metadata can't be read"):
        trained.read(plain, lora_adapter_metadata="{")


def test_what_does_not_fit_is_refused_and_named() -> None:
    trained = Trained.of("sd15", target="attention")
    flux = Trained.of("flux").tensors("diffusers")
    with pytest.raises(UserError, match=r"are of no layer of UNet2DCond.*transformer\.") as refused:
        trained.read(flux)
    assert "this model's family" in refused.value.remedy
    with pytest.raises(UserError, match=r"1 of \d+ arrays .*: x\.alpha"):
        trained.read({**trained.tensors("kohya"), "x.alpha": torch.ones(())})
    wider = Trained.of("sd15", target=["conv_in", "to_q"]).tensors("kohya")
    with pytest.raises(UserError, match=r"1 layers that model\.adapter\.target leaves") as refused:
        trained.read(wider)
    assert "conv_in" in refused.value.remedy
    for fields, remedy in (
        ({"rank": 4}, "model.adapter.rank: 4"),
        ({"alpha": 1.25}, "model.adapter.alpha: 1.25"),
        ({"rank": 2, "alpha": 8.0}, "model.adapter.rank: 2 and model.adapter.alpha: 8"),
        ({"kind": "dora"}, "model.adapter.kind: dora"),
    ):
        other = Trained.of("sd15", target="attention", **fields)
        with pytest.raises(UserError) as refused:
            trained.read(other.tensors("kohya"))
        assert refused.value.remedy == remedy
    file = trained.tensors("kohya")
    del file[next(name for name in file if name.endswith("lora_up.weight"))]
    with pytest.raises(UserError, match="where this adapter has lora_A"):
        trained.read(file)
    by_input = Trained.of("sd15", target=["to_q"], kind="dora")
    file = by_input.tensors("kohya")
    turned = {n: t.T if n.endswith("dora_scale") else t for n, t in file.items()}
    with pytest.raises(UserError, match=r"dora_scale has the shape \(1, "):
        by_input.read(turned)
    assert set(by_input.read(file).arrays) == set(adapter_arrays(by_input.model))
    assert any(name.endswith(MAGNITUDE) for name in by_input.read(file).arrays)


def test_what_is_left_out_is_said() -> None:
    trained = Trained.of("sd15", target="attention")
    few = Trained.of("sd15", target=["to_q"])
    text = {"lora_te_text_model_encoder_layers_0_mlp_fc1.alpha": torch.ones(())}
    found = trained.read({**few.tensors("kohya"), **text})
    assert set(found.arrays) == set(adapter_arrays(few.model))
    assert [note.partition(":")[0] for note in found.notes] == [
        "left out, since no text encoder is trained",
        "not in the file, so with their first values",
    ]


def test_an_export_says_what_readers_make_of_dora() -> None:
    names = find_file_names(build("sdxl"), "unet")
    (line,) = reader_notes(Adapter(kind="dora"), "kohya", names)
    assert "ComfyUI divides by the norms of the weights without the adapter's change" in line
    assert not reader_notes(Adapter(kind="dora"), "diffusers", names)


SILENT = [("sd3", "lora"), ("flux2", "lora"), ("flux", "lokr")]  # loaded without an effect


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        # eighteen models take half a minute: make test-long
        pytest.param(name, kind, marks=[] if (name, kind) in SILENT else [pytest.mark.long])
        for name in COMPONENTS
        for kind in get_args(Kind)
    ],
)
def test_an_export_says_where_diffusers_does_not_apply_it(
    name: str, kind: Kind, tmp_path: Path
) -> None:
    """As diffusers itself shows: the weights are those that were trained, or a note says no.

    Of DoRA in the layout of front ends it takes a part, which is a note of its own.
    """
    trained = Trained.of(name, kind=kind, target="attention")
    base = build(name).state_dict()
    expected = merged(trained.model.state_dict(), trained.adapter)
    changed = [name for name in base if not torch.equal(base[name], expected[name])]
    for layout in get_args(Layout):
        tensors = {name: tensor.contiguous() for name, tensor in trained.tensors(layout).items()}
        save_file(tensors, tmp_path / DIFFUSERS_FILE)
        model = build(name)
        loader = pipeline(name, model)
        with suppress(Exception):  # what it refuses it does not apply
            loader.load_lora_weights(tmp_path)
            loader.fuse_lora()
            loader.unload_lora_weights()
        found = model.state_dict()
        is_right = all(
            name in found and torch.allclose(found[name], expected[name]) for name in changed
        )
        notes = " ".join(reader_notes(trained.adapter, layout, trained.names))
        says_no = "of diffusers does not apply" in notes
        assert is_right != (says_no or "DoRA's magnitudes" in notes), (layout, notes)
        if not says_no and kind != "dora":
            assert not notes
        untouched = any(name in found and torch.equal(found[name], base[name]) for name in changed)
        assert untouched <= says_no


def test_lokr_of_linear_layers_is_loaded_as_an_export_shows(tmp_path: Path) -> None:
    """By the line of the code that is printed, where load_lora_weights() refuses it."""
    trained = Trained.of("sd3", kind="lokr", target="attention")
    tensors = {name: tensor.contiguous() for name, tensor in trained.tensors("diffusers").items()}
    save_file(tensors, tmp_path / DIFFUSERS_FILE)
    model = build("sd3")
    line = loading_line(trained.adapter, trained.names).replace("DIR", str(tmp_path))
    exec(line, {"pipeline": pipeline("sd3", model)})
    model.fuse_lora()
    model.unload_lora()
    expected = merged(trained.model.state_dict(), trained.adapter)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)
    lora = Adapter(kind="lora")
    assert loading_line(lora, trained.names) == 'pipeline.load_lora_weights("DIR")'


def test_metadata_says_what_is_known() -> None:
    kind = type("UNet2DConditionModel", (SimpleNamespace,), {})
    sdxl = kind(config={"cross_attention_dim": 2048, "addition_embed_type": "text_time"})
    about = AboutFile(
        title="pots",
        date="2026-11-25T18:00:00+00:00",
        resolution=(1024, 768),
        trigger="a pot",
        captions={"a pot": 12},
        steps=300,
    )
    adapter = Adapter(rank=8, alpha=4.0)
    written = file_metadata(sdxl, adapter, "kohya", about)
    assert written == {
        "format": "pt",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "8",
        "ss_network_alpha": "4",
        "ss_output_name": "pots",
        "ss_resolution": "(1024, 768)",
        "ss_steps": "300",
        "ss_tag_frequency": '{"pots": {"a pot": 12}}',
        "ss_base_model_version": "sdxl_base_v1-0",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
        "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
        "modelspec.title": "pots",
        "modelspec.date": "2026-11-25T18:00:00+00:00",
        "modelspec.resolution": "1024x768",
        "modelspec.trigger_phrase": "a pot",
    }
    assert file_metadata(build("flux"), Adapter(kind="lokr"), "diffusers", AboutFile()) == {
        "format": "pt",
        "ss_network_module": "lycoris.kohya",
        "ss_network_args": '{"algo": "lokr"}',
        "ss_network_dim": "16",
        "ss_network_alpha": "16",
    }
