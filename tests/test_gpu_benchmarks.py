"""benchmarks/gpu.py and hf_gpu.py: a side that fails costs no other, and MFU is counted right."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from benchmarks.gpu_profile import attention_of
from benchmarks.gpu_result import flops_of_step, result_of, shown
from benchmarks.gpu_turns import Found, Turns, take_turns

from commands import until
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.planner import plan
from samecurve_products.text.language import LanguageModel, model_facts
from tiny import MACHINE, config_of, tiny_values

ABOUT = {
    "device": "cpu",
    "machine": "X9",
    "parameters": 2_000_000,
    "batch": 8,
    "micro": 4,
    "rounds": 2,
    "tokens_per_step": 1000,
    "flops_per_step": {"mfu": 2e12, "mfu_12lt": 3e12},
    "peak_flops": 10e12,
    "ceiling_flops": 8e12,
}

SIDES = f"""
import os, resource, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from benchmarks.gpu_turns import answered

def turn(add):
    name = sys.argv[sys.argv.index("--turn") + 1]
    if name == "raises":
        raise ValueError("no such kernel\\nmore")
    if name == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
        bytearray(1 << 30)
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hangs":
        time.sleep(60)
    if name == "about":
        add({ABOUT!r})
        return
    add({{"seconds": 0.5, "memory": None}})
    if name == "late":
        raise RuntimeError("the profiler failed")
    if "--profile" in sys.argv:
        add({{"profile": {{"attention": ["flash_fwd"], "operations": []}}}})

from pathlib import Path
answered(Path(sys.argv[sys.argv.index("--answer") + 1]), turn)
"""


def test_a_side_that_fails_is_left_out_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever ends a turn, later sides are measured; each is profiled in its first turn, and
    the results are kept after every turn.
    """
    (tmp_path / "failing_sides.py").write_text(SIDES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found: dict[str, Found] = {}
    skipped: dict[str, str] = {}
    kept: list[list[str]] = []
    profiled: list[list[str]] = []
    names = ["good", "raises", "memory", "killed", "late", "last"]

    def keep() -> None:
        kept.append([name for name, one in found.items() if one.seconds])
        profiled.append([name for name, one in found.items() if one.profile])

    take_turns(
        Turns("failing_sides", (), tmp_path, limit=60),
        names,
        2,
        flags=(),
        found=found,
        skipped=skipped,
        keep=keep,
    )
    assert {name: len(one.seconds) for name, one in found.items() if one.seconds} == {
        "good": 2,
        "late": 1,
        "last": 2,
    }
    assert found["good"].profile["attention"] == ["flash_fwd"]
    assert skipped == {
        "raises": "turn 1: ValueError: no such kernel",
        "memory": "turn 1: MemoryError (a smaller --micro holds for every side)",
        "killed": "turn 1: ended by SIGKILL, which is what the system sends when the host's memory"
        " runs out",
        "late": "turn 1, after its timed steps: RuntimeError: the profiler failed",
    }
    assert kept[0] == profiled[0] == ["good"]
    assert len(kept) == len(names) + 2
    hanging = Turns("failing_sides", (), tmp_path, limit=0.5).take("hangs")
    assert hanging == ({}, "no end after 0.5 s (--limit)")
    assert "Traceback" in capfd.readouterr().err  # the place of a failure is in the log


RACE = """
from benchmarks.gpu_main import Race, parser_of, race
words = ["--device", "cpu", "--sides", "good,hangs", "--out", "out"]
arguments = parser_of("sides that fail", {}).parse_args(words)
race(Race("failing_sides", "", "", (), arguments, None, {}, {}))
"""


@pytest.mark.long
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "failing_sides.py").write_text(SIDES)
    paths = [str(tmp_path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", RACE]
    out = tmp_path / "out"
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        until(lambda: process.poll() is not None or (out.exists() and "good" in out.read_text()))
        until(lambda: psutil.Process(process.pid).children())  # the next side's turn
        turn = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert not psutil.wait_procs(turn, 10)[1]
    result = json.loads(out.read_text())
    assert list(result["sides"]) == ["good"]
    skipped = {"good": "turn 2: stopped by SIGINT", "hangs": "turn 1: stopped by SIGINT"}
    assert result["skipped"] == skipped


def test_mfu_counts_attention_by_both_formulas(tmp_path: Path) -> None:
    """Two layers of 8, heads of 4, inner 16, vocabulary 32, 16 tokens; 10 samples a step.

    By hand: a layer multiplies each token with 4 x 8 x 8 + 3 x 8 x 16 = 640 weights, the head with
    8 x 32 = 256: N = 1536. Attention of a token in full: 2 layers x 12 x 8 x 16 = 3072.
    """
    fields = LanguageModel.model_validate(
        {
            "hidden_size": 8,
            "num_layers": 2,
            "num_heads": 2,
            "kv_heads": 2,
            "intermediate_size": 16,
            "max_seq_len": 16,
        }
    )
    counted = model_facts(fields, 32, unfused=False)
    facts = Facts.of(
        samples=100,
        eval_samples=10,
        tokens_per_sample=16,
        params=4,
        trainable=4,
        blocks=0,
        bytes_per_sample=None,
        flops_per_sample=counted["flops_per_sample"],
        coupled=(),
        fingerprint="",
    )
    made = plan(config_of(tiny_values(tmp_path, batch={"samples": 10})), MACHINE, facts)
    assert flops_of_step(made, layers=2, width=8) == {
        "mfu": 160 * (6 * 1536 + 3072 / 2),
        "mfu_12lt": 160 * (6 * 1536 + 3072),
    }


def test_the_table_names_formulas_kernels_and_what_was_left_out() -> None:
    profile = {
        "attention": ["flash_fwd"],
        "wall_seconds": 3.0,
        "idle_share": 0.25,
        "operations": [{"name": "mm", "seconds": 1.0, "share": 0.5}],
    }
    found = {"samecurve": Found([0.5, 0.4, 0.6], 1 << 30, profile), "plain": Found([1.0], None)}
    result = json.loads(json.dumps(result_of(ABOUT, found, {"trainer": "turn 1: no memory"})))
    assert result["sides"]["samecurve"]["mfu"] == pytest.approx(0.4)
    assert result["sides"]["samecurve"]["mfu_12lt"] == pytest.approx(0.6)
    assert result["sides"]["samecurve"]["mfu_of_ceiling"] == pytest.approx(0.5)
    assert result["sides"]["plain"]["time_beside_samecurve"] == pytest.approx(2.0)
    text = shown(result)
    for part in (
        "40.0%     60.0%",
        "trainer left out, turn 1: no memory",
        "6 N + 12 L d T",
        "attention of samecurve: flash_fwd",
        "idle for 25.0%",
    ):
        assert part in text


def test_the_attention_kernel_is_found_by_its_name() -> None:
    kernels = ["void pytorch_flash::flash_fwd_kernel<...>", "gemm", "fmha_cutlassB_bf16"]
    operations = {"aten::scaled_dot_product_attention", "aten::mm", *kernels}
    assert attention_of(kernels, operations) == [kernels[0], kernels[2]]
    assert attention_of(["gemm", "softmax"], {"aten::mm"}) == []
