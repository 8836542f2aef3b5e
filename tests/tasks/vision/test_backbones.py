"""timm's models as backbones: weights from files, a new head, norms, and one result on any devices.

timm's own smallest models (test_vit, test_resnet, test_efficientnet) are the ones trained here.
"""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if find_spec("timm") is None:
    pytest.skip("pip install --no-deps timm", allow_module_level=True)

import torch
from class_pictures import make_folder
from safetensors.torch import save_file

from one_curve import check_one_curve
from samecurve.checkpoint.format import load as load_checkpoint
from samecurve.core.config.document import read_document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.planner import plan
from samecurve.errors import InvalidConfigError, UserError
from samecurve.observe import read_events
from samecurve.run.directory import Run
from samecurve.tasks import Tasks, open_task
from samecurve_products.pictures.vision.timm_library import create
from starts import start, train
from tiny import MACHINE, config_of
from worlds import Pool

SIDE = 64
RECIPE = {"crop": 0.5, "flip": 0.5, "mixup": 0.2, "cutmix": 1.0}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures") / "set"
    return make_folder(root, {"disc": 16, "ring": 16, "square": 16}, side=SIDE)


def weights_of(name: str, directory: Path, **options: Any) -> Path:
    """A file with weights of a backbone of ten classes, as timm would save them."""
    torch.manual_seed(3)
    model = create(name, num_classes=10, **options)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"architecture": name, "num_classes": 10}))
    return directory


def values(pictures: Path, model: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "task": "vision",
        "model": dict(model),
        "data": {
            **{"source": str(pictures), "resolution": SIDE, "validation": 0.25},
            **sections.pop("data", {}),
        },
        "batch": {"samples": 12},
        "optimizer": {"lr": 2e-3, **sections.pop("optimizer", {})},
        "train": {"steps": 6, "precision": "f64", **sections.pop("train", {})},
        "devices": {"use": "cpu", "preflight": 0, **sections.pop("devices", {})},
        **sections,
    }


@pytest.mark.long
@pytest.mark.parametrize("worlds", [(2,), (2, 4)])
def test_a_fine_tuned_backbone_has_one_accuracy_to_the_last_digit(
    worlds: tuple[int, ...], pictures: Path, pool: Pool, tmp_path: Path
) -> None:
    """Under --exact: losses, evaluations and weights are equal to the bit; layer-wise decay of the
    learning rate, frozen layers, a moving average, and stochastic depth are part of it.
    """
    steps = 6 if worlds == (2,) else 60
    path = weights_of("test_vit", tmp_path / "weights")
    results = {}
    for world in (1, *worlds):
        config = values(
            pictures,
            {"backbone": "test_vit", "path": str(path), "drop_path": 0.2, "label_smoothing": 0.1},
            data={"augment": RECIPE},
            optimizer={
                "groups": [
                    {"match": "patch_embed.*", "freeze": True},
                    {"match": "blocks.0.*", "lr_scale": 0.5},
                ]
            },
            train={
                "precision": "f32",
                "exact": True,
                "steps": steps,
                "eval_every": steps,
                "ema": 0.9,
            },
            devices={"use": f"cpu:{world}"},
        )
        home = tmp_path / f"on-{world}"
        losses = train(pool, start(home, config, tmp_path / "cache", init_from=path))
        run = Run(home)
        events = read_events(run.journal)
        evaluated = [dict(event.values) for event in events if event.kind == "evaluated"]
        numbers = [(each["loss"], each["accuracy"], each["top5"]) for each in evaluated]
        arrays = load_checkpoint(sorted(run.checkpoints.glob("step-*"))[-1]).arrays
        weights = {name: array.tobytes() for name, array in arrays.items()}
        results[world] = losses, numbers, weights
    assert all(results[world] == results[1] for world in worlds)
    assert results[1][1][-1][1] > (0.3 if steps == 6 else 0.9)


def test_weights_begin_with_a_new_head_and_positions_of_this_size(
    pictures: Path, tmp_path: Path
) -> None:
    path = weights_of("test_vit", tmp_path / "weights")  # of images of 160 x 160
    config = values(pictures, {"backbone": "test_vit", "path": str(path)})
    run = start(tmp_path / "run", config, tmp_path / "cache", init_from=path).run
    first = load_checkpoint(run.initial, weights_only=True).arrays
    stored = create("test_vit", num_classes=10).state_dict()
    shapes = {name.removeprefix("model/"): array.shape for name, array in first.items()}
    assert shapes["head.weight"] == (3, stored["head.weight"].shape[1])
    assert shapes["pos_embed"] == (1, 1 + (SIDE // 16) ** 2, stored["pos_embed"].shape[2])
    assert not first["model/head.bias"].any()
    assert 0.01 < first["model/head.weight"].std() < 0.03


def test_what_does_not_fit_is_refused_with_the_first_difference(
    pictures: Path, tmp_path: Path
) -> None:
    vit = weights_of("test_vit", tmp_path / "vit")
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"backbone": "resnet81"}, "has no model resnet81", "did you mean"),
        ({"backbone": "hf-hub:timm/test_vit"}, "would be downloaded", "model.path"),
        ({"backbone": "test_vit", "path": str(tmp_path / "no")}, "there is no", "a .safetensors"),
        ({"backbone": "test_vit2", "path": str(vit)}, "43 missing (reg_token", "model.* fields"),
        ({"backbone": "test_resnet", "path": str(vit)}, "missing (conv1.0.weight", "other weights"),
    ]
    for model, cause, remedy in cases:
        home = tmp_path / "run"
        init_from = Path(model["path"]) if "path" in model else None
        with pytest.raises(UserError) as caught:
            start(home, values(pictures, model), tmp_path / "cache", init_from=init_from)
        text = f"{caught.value.cause} {caught.value.remedy}"
        assert remedy in text
        assert cause in text
    for model, words in (
        ({"backbone": "test_vit", "width": 8}, "width is of arch, and the backbone test_vit"),
        ({"path": "x"}, "path is of a backbone"),
        ({"backbone": "test_resnet", "freeze_norms": True}, "keeps the statistics of model.path"),
    ):
        with pytest.raises(InvalidConfigError, match=words):
            config_of(values(pictures, model))
    jax = config_of(values(pictures, {"backbone": "test_vit"}, engine="jax"))
    with pytest.raises(UserError, match="is a PyTorch model"):
        open_task(jax, tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param("test_efficientnet", ["ddp:2"], marks=pytest.mark.long),
        pytest.param("test_resnet", ["ddp:3", "dp:2", "fsdp:2"], marks=pytest.mark.long),
    ],
)
def test_batch_norms_are_refused_synchronised_or_frozen(
    name: str, layouts: list[str], pictures: Path, pool: Pool, tmp_path: Path
) -> None:
    facts = open_task(config_of(values(pictures, {"backbone": name})), tmp_path / "cache").facts()
    split = config_of(values(pictures, {"backbone": name}, devices={"use": "cpu:2"}))
    with pytest.raises(UserError, match="mixes the samples of a batch"):
        plan(split, MACHINE, facts)
    synchronised = values(
        pictures, {"backbone": name, "drop_path": 0.1}, train={"norm_sync": True, "steps": 3}
    )
    check_one_curve(config_of(synchronised), layouts, pool, tmp_path, steps=3, near=1e-10)
    path = weights_of(name, tmp_path / "weights")
    model = {"backbone": name, "path": str(path), "freeze_norms": True}
    frozen = values(pictures, model, devices={"use": "cpu:2"}, train={"steps": 3})
    assert not open_task(config_of(frozen), tmp_path / "cache").facts().coupled
    home = tmp_path / "frozen"
    losses = train(pool, start(home, frozen, tmp_path / "cache", init_from=path))
    alone = values(pictures, model, train={"steps": 3})
    again = train(pool, start(tmp_path / "alone", alone, tmp_path / "cache", init_from=path))
    np.testing.assert_allclose(losses, again, rtol=1e-10)
    first = load_checkpoint(Run(home).initial, weights_only=True).arrays
    last = load_checkpoint(sorted(Run(home).checkpoints.glob("step-*"))[-1]).arrays
    kept = [name for name in first if name.endswith("running_mean")]
    assert kept
    for buffer in kept:
        np.testing.assert_array_equal(first[buffer], last[buffer])


def test_a_norm_with_an_activation_is_the_same_as_timms() -> None:
    from samecurve_products.pictures.vision.backbone import _take_activation_out

    torch.manual_seed(0)
    model = create("test_efficientnet", num_classes=3)
    images = torch.rand(4, 3, SIDE, SIDE)
    expected = model(images)
    torch.manual_seed(0)
    changed = create("test_efficientnet", num_classes=3)
    norms = [each for each in changed.modules() if type(each).__name__ == "BatchNormAct2d"]
    assert norms
    for each in norms:
        _take_activation_out(each)
    assert torch.equal(changed(images), expected)
    assert changed.state_dict().keys() == model.state_dict().keys()


PRESET = Path(__file__).parents[3] / "models/image-folder.yaml"


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "resnet50", "convnext_tiny"])
def test_the_preset_s_groups_fit_other_backbones(name: str) -> None:
    """Rates by block are for vision transformers; other models leave those groups out."""
    with torch.device("meta"):
        model = create(name, num_classes=3)
    document = read_document(PRESET)
    document.set("model.backbone", name, "--set")
    rules = load_document(document, Tasks()).config.optimizer.rules
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    *used, last = rules.describe(sizes)["groups"]
    is_vit = name.startswith("vit")
    assert len(used) == (14 if is_vit else 0)
    assert ("left out (optional)" in last) is not is_vit


def test_the_preset_without_pictures_says_how_to_name_them(cache: Path) -> None:
    with pytest.raises(UserError, match="no -d names a folder of pictures") as refused:
        open_task(load_document(read_document(PRESET), Tasks()).config, str(cache)).facts()
    assert refused.value.remedy.startswith("-d DIR names your pictures")
