"""OneTrainer's launcher: its own lines train, with its JSON, converted as the run begins."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import losses
from samecurve.cli.standalone import on_all_gpus

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_multi_gpu.py"
CONFIG = {
    "training_method": "FINE_TUNE",
    "model_type": "STABLE_DIFFUSION_XL_10_BASE",
    "base_model_name": "models/sdxl",
    "concepts": [{"path": "pictures"}],
    "text_encoder": {"train": False},
    "text_encoder_2": {"train": False},
    "enable_multi_gpu": True,
    "use_torchrun": False,
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "train_dtype": "FLOAT_32",
}
OWN = [  # a model of one's own in place of the diffusion model
    *("--set", f"task={ROOT / 'examples/ragged.py'}:Ragged", "--set", "model={width: 8, depth: 1}"),
    *("--set", "data={samples: 95, held_out: 10}"),
]


@pytest.mark.parametrize(
    ("arguments", "environment", "gpus", "begins"),
    [
        (["--config-path=a.json"], {}, 8, ["train", "--num-gpus", "0"]),
        (["--config-path=a.json", "--num-gpus=2"], {}, 8, ["train", "--config-path=a.json"]),
        (["--config-path=a.json", "--gpus", "1"], {}, 8, ["train", "--config-path=a.json"]),
        (["--config-path=a.json"], {}, 0, ["train", "--config-path=a.json"]),
        (
            ["--config-path=a.json"],
            {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"},
            2,
            ["train", "--config-path=a.json"],
        ),
    ],
)
def test_all_gpus_are_taken_where_nothing_says_which(
    arguments: list[str], environment: dict[str, str], gpus: int, begins: list[str]
) -> None:
    words = on_all_gpus(arguments, environment, gpus)
    assert words[: len(begins)] == begins
    assert words[-len(arguments) :] == arguments


def start(home: Path, devices: str, run: str, *flags: str) -> str:
    """The guide's line, with CPU ranks in place of GPUs. Returns what it prints."""
    line = ["--config-path=your_config.json", "--distributed-backend=gloo", "--spawn"]
    line += ["--distributed-data-loading", "--port", "0", "--devices", devices]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *line, "--save-dir", run, *flags],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr + done.stdout


def test_the_guides_line_trains_its_json(tmp_path: Path) -> None:
    """What each field became is said before the first step."""
    (tmp_path / "your_config.json").write_text(json.dumps(CONFIG))
    printed = start(tmp_path, "cpu:2", "run", "--max-steps", "3", *OWN)
    assert "note   your_config.json is a config of OneTrainer" in printed
    assert "concepts.0.path pictures -> data.source[0].source" in printed
    assert "batch 16 = 2 devices x 4 x 2 rounds" in printed
    assert len(losses(tmp_path / "run")) == 3


@pytest.mark.long
def test_its_json_trains_one_curve_on_one_and_two_devices(tmp_path: Path) -> None:
    """A whole small Stable Diffusion, from the folders of a file that the JSON names."""
    pytest.importorskip("diffusers", reason="pip install -e '.[diffusion]'")
    from noise_pictures import write_pictures
    from tiny_pipelines import save_sd15

    save_sd15(tmp_path / "models" / "sd15")
    write_pictures(tmp_path / "pictures")
    concept = {"path": "pictures", "image": {"enable_random_flip": True}, "image_variations": 2}
    (tmp_path / "concepts.json").write_text(json.dumps([concept]))
    fields = {
        "model_type": "STABLE_DIFFUSION_15",
        "base_model_name": "models/sd15",
        "concepts": None,
        "concept_file_name": "concepts.json",
        "resolution": "64",
        "epochs": 2,
        "learning_rate_warmup_steps": 2,
        "loss_weight_fn": "MIN_SNR_GAMMA",
    }
    (tmp_path / "your_config.json").write_text(json.dumps({**CONFIG, **fields}))
    curves = []
    for devices in ("cpu:1", "cpu:2"):
        run = devices.replace(":", "")
        assert "10 steps of" in start(tmp_path, devices, run, "--global-batch", "4")
        curves.append(losses(tmp_path / run))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert len(set(curves[0])) == 10
