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
    *("--set", "data={samples: 95, held_out: 10}", "--set", "train.recompute=none"),
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


def test_the_guides_line_trains_its_json(tmp_path: Path) -> None:
    """On two CPU ranks in place of the GPUs: what each field became is said before the first
    step.
    """
    (tmp_path / "your_config.json").write_text(json.dumps(CONFIG))
    line = ["--config-path=your_config.json", "--distributed-backend=gloo", "--spawn"]
    line += ["--distributed-data-loading", "--port", "0", "--devices", "cpu:2"]
    line += ["--max-steps", "3", "--save-dir", "run", *OWN]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "note   your_config.json is a config of OneTrainer" in done.stderr
    assert "concepts.0.path pictures -> data.source[0].source" in done.stderr
    assert "batch 16 = 2 devices x 4 x 2 rounds" in done.stdout + done.stderr
    assert len(losses(tmp_path / "run")) == 3
