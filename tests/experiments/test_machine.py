"""`samecurve plan --machine` as a user types it, on a machine without any GPU."""

import json
import sys
from pathlib import Path

import pytest

import samecurve
from commands import refused, write_config
from samecurve.cli.main import main
from samecurve.errors import UserError


def plan(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    home: Path,
    *arguments: object,
) -> str:
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "argv", ["samecurve", "plan", *map(str, arguments)])
    main()
    return capsys.readouterr().out


@pytest.mark.long
def test_8b_parameters_with_adamw_fit_on_one_h200(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """90 % of its memory lacked 0.4 GiB."""
    file = Path(__file__).parents[2] / "models/llama-3.1-8b.yaml"
    said = plan(monkeypatch, capsys, tmp_path, "-f", file, "--machine", "1xH200")
    assert said.startswith("plan   world 1   single   bf16   H200")


def test_it_shows_strategies_formulas_and_curves_and_draws(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    corpus: Path,
) -> None:
    file = write_config(tmp_path, corpus)
    shown = plan(
        monkeypatch,
        capsys,
        tmp_path,
        "-f",
        file,
        "--dtype",
        "bf16",
        "--machine",
        "4x8xH200",
        "--batch-size",
        2,
        "--mfu",
        0.5,
        "--chart",
        "out.png",
    )
    assert "world 32   ddp over nccl" in shown
    assert "batch 64 = 32 devices x 2 x 1 round" in shown
    for text in (
        "H200: 140.4 GiB",
        "NVLink 4",
        "InfiniBand NDR",
        "MFU 0.5 while a device computes: as --mfu says",
        "hsdp/8 is --strategy hsdp --set devices.shards=8",
        "how a step of ddp",
        "all-reduce x 1 of",
        " 1024\n",
    ):
        assert text in shown
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    value = json.loads(
        plan(
            monkeypatch,
            capsys,
            tmp_path,
            "-f",
            file,
            "--dtype",
            "bf16",
            "--machine",
            "4x8xH200",
            "--batch-size",
            2,
            "--json",
        )
    )
    assert value["plan"]["batch"] == 64
    rows = value["predicted"]["rows"]
    assert {(row["strategy"], row["recompute"]) for row in rows} == {
        (name, how) for name in ("ddp", "hsdp", "fsdp") for how in ("none", "selective", "block")
    }
    assert all(
        row["seconds"]
        == pytest.approx(row["compute_seconds"] + row["update_seconds"] + row["exposed_seconds"])
        for row in rows
    )
    made = samecurve.plan(file, machine="4x8xH200", dtype="bf16")
    assert (made.num_devices, made.flops.peak_flops) == (32, 32 * 989e12)


def test_a_plan_that_is_refused_there_shows_what_would_not_be(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    corpus: Path,
) -> None:
    file = write_config(tmp_path, corpus)
    large = (
        "-f",
        file,
        "--dtype",
        "bf16",
        "--set",
        "model.hidden_size=4096",
        "--set",
        "model.intermediate_size=14336",
        "--set",
        "model.num_layers=32",
        "--set",
        "batch.samples=64",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        ["samecurve", "plan", *map(str, large), "--machine", "8xH100", "--strategy", "ddp"],
    )
    with pytest.raises(SystemExit) as left:
        main()
    output = capsys.readouterr()
    assert left.value.code == 2
    assert "ddp       none       does not fit: 1" in output.out
    assert "fsdp      block" in output.out
    assert "need 1" in output.err
    assert "under ddp; H100 has 79.6 GiB" in output.err
    with pytest.raises(UserError, match="under ddp"):
        samecurve.plan(
            file,
            machine="8xH100",
            strategy="ddp",
            dtype="bf16",
            set={
                "model.hidden_size": 4096,
                "model.intermediate_size": 14336,
                "model.num_layers": 32,
                "batch.samples": 64,
            },
        )


def test_the_share_that_bench_measured_is_taken_and_what_is_not_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    corpus: Path,
) -> None:
    file, bench = write_config(tmp_path, corpus), tmp_path / "bench.json"
    bench.write_text(
        '{"config": "nano", "device": "H100", "precision": "bf16", "layouts": [{"world": 2, "mfu":'
        ' 0.2}, {"world": 1, "mfu": 0.47}]}'
    )
    flags_of_run = ("-f", file, "--dtype", "bf16", "--machine", "8xH100")
    assert "MFU 0.47 while a device computes: measured on one device" in plan(
        monkeypatch, capsys, tmp_path, *flags_of_run, "--from", bench
    )
    for content, says in [
        ("[]", "no layout of one device"),
        ('{"layouts": [{"world": 1}]}', "no mfu"),
        ("{", "is not JSON"),
        ('{"layouts": [{"world": 1, "mfu": 47}]}', "an MFU of 47"),
        ('{"precision": "f32", "layouts": [{"world": 1, "mfu": 0.4}]}', "measured in f32"),
    ]:
        bench.write_text(content)
        assert says in refused(
            monkeypatch, capsys, "plan", *flags_of_run, "--from", bench, cwd=tmp_path
        )
    for flags, says in [
        (("--mfu", 0.3, "--from", bench), "both set the MFU"),
        (("--chart", "x.pdf"), "no name of a PNG"),
        (("--chart", "no/x.png"), "can't be written"),
        (("--probe-batch",), "--probe-batch tries this machine"),
        (("--devices", "cpu:2"), "says which devices there are"),
        (("--engine", "jax"), "torch"),
        (("--exact",), "--exact"),
    ]:
        assert says in refused(monkeypatch, capsys, "plan", *flags_of_run, *flags, cwd=tmp_path)
    assert "--mfu is for another machine" in refused(
        monkeypatch, capsys, "plan", "-f", file, "--mfu", 0.3, cwd=tmp_path
    )
