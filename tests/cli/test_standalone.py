"""scripts/run_*_standalone.py: plain starts and torchrun train the same; a plain start that would
leave GPUs idle says so.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from commands import losses, write_config
from samecurve.cli.standalone import Standalone

ROOT = Path(__file__).parents[2]
SCRIPT = Standalone("scripts/run_hf_standalone.py", ROOT / "models/llama-3.1-8b.yaml", "auto")
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8"}


def test_one_of_many_gpus_is_said_with_the_line_that_uses_all() -> None:
    words, note = SCRIPT.command_line(["--max-steps", "5"], {}, 8)
    assert words[-4:] == ["--gpus", "0", "--max-steps", "5"]
    assert note.startswith("note   8 GPUs are visible, and a plain start of Python uses one, GPU 0")
    assert note.endswith("torchrun --nproc_per_node=8 scripts/run_hf_standalone.py --max-steps 5")
    for arguments, environment, gpus in (
        ([], TORCHRUN, 8),
        (["--gpus", "0,1"], {}, 8),
        (["--nproc", "4"], {}, 8),
        (["--devices=cpu:2"], {}, 8),
        ([], {}, 1),
        ([], {}, 0),
    ):
        words, note = SCRIPT.command_line(arguments, environment, gpus)
        assert not note
        assert ("--gpus" in words[1 : len(words) - len(arguments)]) == (gpus == 1)
        assert words[words.index("--global-batch") + 1] == "64"


def test_grad_accum_fixes_the_batch_instead() -> None:
    words, _ = SCRIPT.command_line(["--grad-accum-steps", "4"], {}, 0)
    assert "--global-batch" not in words


def start(script: str, home: Path, run: str, *before: str, code: int = 0) -> str:
    line = [*before, str(ROOT / "scripts" / script), "-f", "tiny.yaml", "--devices", "cpu"]
    line += ["--max-steps", "3", "--save-dir", run]
    done = subprocess.run(line, cwd=home, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_plain_start_trains_the_batch_that_it_prints(tmp_path: Path, corpus: Path) -> None:
    write_config(tmp_path, corpus)
    printed = start("run_hf_standalone.py", tmp_path, "plain", sys.executable)
    assert "batch 64 = 1 device x 1 x 64 rounds" in printed
    assert len(losses(tmp_path / "plain")) == 3


@pytest.mark.long
def test_torchrun_trains_the_same(tmp_path: Path, corpus: Path) -> None:
    write_config(tmp_path, corpus)
    start("run_hf_standalone.py", tmp_path, "plain", sys.executable)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2")
    for script, strategy in (("run_hf_standalone.py", "ddp"), ("run_fsdp_standalone.py", "fsdp")):
        printed = start(script, tmp_path, strategy, *torchrun)
        assert f"world 2   {strategy} over gloo" in printed
        assert "batch 64 = 2 devices x 1 x 32 rounds" in printed
        assert losses(tmp_path / strategy) == pytest.approx(losses(tmp_path / "plain"), rel=1e-12)
