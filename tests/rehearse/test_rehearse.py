"""`samecurve rehearse`, as it is typed: a config and three kinds of foreign scripts.

Each script plants a fault when it is named on its command line; the line with the fault ends with
`# <fault>`, and the rehearsal must name this very line.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import samecurve, started
from samecurve.core.system.cache import cache_home
from samecurve.errors import UserError
from samecurve_products.rehearse.emulator import check_can_emulate, memory_of

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"
Report = dict[str, Any]


@pytest.fixture(autouse=True)
def can_emulate() -> None:
    try:
        check_can_emulate()
    except UserError as error:
        pytest.skip(error.cause)


def line_of(script: Path, fault: str) -> str:
    """The place of a planted fault, as a rehearsal names it."""
    lines = script.read_text().splitlines()
    number = next(index for index, line in enumerate(lines, 1) if line.endswith(f"  # {fault}"))
    return f"{script.name}:{number} "


def findings(report: Report, kind: str) -> list[Report]:
    return [finding for finding in report["findings"] if finding["kind"] == kind]


def rehearsed(cwd: Path, *words: object, code: int) -> Report:
    """The report of a rehearsal as JSON; its exit code must be this one."""
    done = samecurve("rehearse", "--json", *words, cwd=cwd, code=code, timeout=300)
    report: Report = json.loads(done.stdout)
    assert report["fails"] == bool(code)
    return report


def test_a_missing_wait_in_a_script_is_named_with_its_line(tmp_path: Path) -> None:
    """The short one of the scripts below: one process, one emulated GPU."""
    script = SCRIPTS / "ddp_loop.py"
    report = rehearsed(tmp_path, "--gpus", 1, "--", "python", script, "prefetch", code=1)
    races = findings(report, "race")
    assert line_of(script, "prefetch") in races[0]["place"]
    assert (report["steps"], report["exit_code"]) == (5, 0)
    assert not [*cache_home().glob("rehearse/*")]


FAULTS = {
    ("ddp_loop.py", ""): "",
    ("ddp_loop.py", "sync"): "host sync",
    ("ddp_loop.py", "prefetch"): "race",
    ("ddp_loop.py", "pinned"): "pinned_source",
    ("ddp_loop.py", "device"): "device",
    ("ddp_loop.py", "histc"): "not_deterministic",
    ("ddp_loop.py", "order"): "collective",
    ("hf_trainer.py", ""): "",
    ("hf_trainer.py", "sync"): "host sync",
    ("hf_trainer.py", "device"): "device",
    ("accelerate_loop.py", ""): "",
    ("accelerate_loop.py", "sync"): "host sync",
    ("accelerate_loop.py", "stream"): "race",
}


@pytest.mark.long  # each starts torchrun and two ranks that import torch: 10 s
@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_each_fault_planted_in_a_script_is_found_at_its_line(
    name: str, fault: str, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate" if "accelerate" in name else "transformers")
    script, kind = SCRIPTS / name, FAULTS[name, fault]
    fails = kind not in {"", "host sync", "not_deterministic"}
    words = ("--", "torchrun", "--nproc_per_node", 2, script, *([fault] if fault else []))
    report = rehearsed(tmp_path, *words, code=int(fails))
    places = [finding["place"] for finding in findings(report, kind or "host sync")]
    found = [place for place in places if line_of(script, fault or "sync") in place]
    assert bool(found) == bool(fault), report["findings"]
    if not fails:
        assert report["steps"] == 5
        assert report["costs"]["collectives"] >= 1
        assert findings(report, "race") == []


def planted_task(home: Path, edit: Callable[[str], str] = str) -> tuple[str, str]:
    """The words that name a config with the example's task, changed."""
    (home / "my_task.py").write_text(edit((EXAMPLES / "my_task.py").read_text()))
    config = (EXAMPLES / "my_task.yaml").read_text().replace("examples/", "")
    (home / "my_task.yaml").write_text(config)
    return "-f", "my_task.yaml"


def with_loss_line(*lines: str, parameters: str = "") -> Callable[[str], str]:
    """Adds lines after the loss's first line, and parameters to the loss."""
    first = '        out = model(batch["x"])\n'
    edits = {
        "import numpy as np\n": "import numpy as np\nimport torch\n",
        first: first + "".join(f"        {line}\n" for line in lines),
        "def loss(self, model, batch)": f"def loss(self, model, batch{parameters})",
    }

    def edit(text: str) -> str:
        for old, new in edits.items():
            assert old in text
            text = text.replace(old, new)
        return text

    return edit


@pytest.mark.long  # two runs of `train`, each with a start of its own: 15 s
def test_a_config_has_the_losses_of_one_cpu_device(tmp_path: Path) -> None:
    words = planted_task(tmp_path)
    report = rehearsed(tmp_path, *words, "--gpus", 3, "--strategy", "fsdp", code=0)
    assert report["plan"].startswith("fsdp over nccl, f32, batch 50 = ")
    assert "over 3 devices" in report["plan"]
    assert report["steps"] == report["steps_asked"] == len(report["losses"]["on_cpu"]) == 5
    assert report["losses"]["difference"] < 1e-5
    assert report["findings"] == []
    assert report["costs"]["collectives"] > 0
    assert 0 < report["memory"]["peak"] < report["memory"]["limit"] == memory_of("H100")


@pytest.mark.long  # as above
def test_a_sync_in_a_users_loss_is_named_and_our_own_are_not(tmp_path: Path) -> None:
    words = planted_task(
        tmp_path, with_loss_line("if out.abs().max() > 1e6:  # sync", "    raise ValueError")
    )
    report = rehearsed(tmp_path, *words, code=0)
    (finding,) = findings(report, "host sync")
    assert finding["place"].startswith(line_of(tmp_path / "my_task.py", "sync").strip())
    assert finding["times"] == 1
    assert report["costs"]["own_syncs"] >= 1


@pytest.mark.long  # as above
def test_a_cpu_tensor_in_a_users_loss_is_named_with_a_remedy(tmp_path: Path) -> None:
    words = planted_task(tmp_path, with_loss_line("out = out * torch.ones(2)  # device"))
    report = rehearsed(tmp_path, *words, code=1)
    (finding,) = findings(report, "device")
    assert finding["place"] == line_of(tmp_path / "my_task.py", "device").strip()
    assert "device=x.device" in finding["remedy"]


@pytest.mark.long  # as above
def test_a_config_that_no_device_can_train_is_refused_as_train_refuses_it(tmp_path: Path) -> None:
    words = planted_task(tmp_path, with_loss_line("raise ValueError('mine')"))
    done = samecurve("rehearse", *words, cwd=tmp_path, code=2, timeout=300)
    assert "ValueError: mine" in done.stderr
    assert done.stdout == ""


@pytest.mark.long  # as above
def test_out_of_memory_is_told_with_its_step(tmp_path: Path) -> None:
    """The plan knows nothing of what a user's loss holds, so the run ends in its third step."""
    words = planted_task(
        tmp_path,
        with_loss_line(
            "if step >= 3:", "    torch.empty(1 << 30, device=out.device)", parameters=", step"
        ),
    )
    report = rehearsed(tmp_path, *words, "--memory", "2GB", code=1)
    (finding,) = findings(report, "out of memory")
    assert finding["step"] == report["steps"] + 1 > 1
    assert "asked for 4.0 GiB more" in finding["text"]


@pytest.mark.long  # as above
def test_a_plan_that_needs_more_than_the_gpus_have_is_told(tmp_path: Path) -> None:
    words = ("-f", EXAMPLES.parent / "models/tiny.yaml", "--memory", "20MB")
    report = rehearsed(tmp_path, *words, code=1)
    (finding,) = findings(report, "out of memory")
    assert finding["remedy"]
    assert report["steps"] == 0


@pytest.mark.long  # as above
def test_ctrl_c_ends_all_processes_and_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        "import time, torch\n"
        "x = torch.ones(1, device='cuda')\n"
        "print('on', flush=True)\n"
        "time.sleep(600)\n"
    )
    with started("rehearse", "--", "python", script, cwd=tmp_path) as process:
        assert process.stdout is not None
        while "on" not in process.stdout.readline():
            pass
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert not [*cache_home().glob("rehearse/*")]
