"""What only a GPU can show: the same curve as on the CPU, half precision, gradients over Gloo from
GPU memory.
"""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from commands import losses, samecurve, write_config
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.observe import read_events
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.model.cross_entropy import Head
from samecurve.torch_engine.process_group import Comm
from samecurve_products.text.language import LanguageModel
from samecurve_products.text.language.torch_task import Block, rotary
from tiny import MACHINE, TinyRun, config_of, ragged_task, tiny_values, train_tiny
from worlds import Pool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["f64", "f32"])
def test_a_gpu_and_a_cpu_give_one_curve(
    precision: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """Kernels differ, so the tolerance is that of rounding carried through 50 steps."""
    values = tiny_values(corpus, train={"precision": precision})
    on_cpu = pool.run(1, train_tiny, TinyRun(tmp_path / "cpu", values, cache))[0]
    on_gpu = pool.run(1, train_tiny, TinyRun(tmp_path / "gpu", values, cache, device="cuda:0"))[0]
    np.testing.assert_allclose(
        on_gpu.losses, on_cpu.losses, rtol=1e-10 if precision == "f64" else 1e-4
    )


@pytest.mark.parametrize(
    ("world", "optimizer"), [(2, "adamw"), (3, "adamw"), (3, "adafactor"), (3, "muon")]
)
def test_ranks_sharing_one_gpu_over_gloo_give_one_curve(
    world: int, optimizer: str, *, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    values = tiny_values(corpus, optimizer={"name": optimizer})
    one = pool.run(1, train_tiny, TinyRun(tmp_path / "one", values, cache, device="cuda:0"))[0]
    several = pool.run(
        world, train_tiny, TinyRun(tmp_path / "several", values, cache, device="cuda:0")
    )[0]
    np.testing.assert_allclose(several.losses, one.losses, rtol=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_half_precision_learns(
    precision: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    values = tiny_values(corpus, train={"precision": precision})
    found = pool.run(2, train_tiny, TinyRun(tmp_path / "run", values, cache, device="cuda:0"))[0]
    assert np.mean(found.losses[-5:]) < 0.9 * np.mean(found.losses[:5])


def test_a_checkpoint_moves_between_gpu_and_cpu(
    pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    values = tiny_values(corpus)
    whole = pool.run(1, train_tiny, TinyRun(tmp_path / "whole", values, cache))[0]
    pool.run(1, train_tiny, TinyRun(tmp_path / "moved", values, cache, stop_at=25, device="cuda:0"))
    moved = pool.run(
        2,
        train_tiny,
        TinyRun(
            tmp_path / "moved", values, cache, resume=tmp_path / "moved/checkpoints/step-00000025"
        ),
    )[0]
    np.testing.assert_allclose(moved.losses, whole.losses, rtol=1e-10)


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_replicas_on_one_gpu_give_one_curve(
    strategy: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    one = pool.run(
        1, train_tiny, TinyRun(tmp_path / "one", tiny_values(corpus), cache, device="cuda:0")
    )[0]
    values = tiny_values(corpus, devices={"use": "cpu:2", "strategy": strategy})
    found = pool.run(
        1 if strategy == "dp" else 2,
        train_tiny,
        TinyRun(tmp_path / "two", values, cache, device="cuda:0"),
    )[0]
    np.testing.assert_allclose(found.losses, one.losses, rtol=1e-12)


@pytest.mark.parametrize("precision", ["f64", "bf16"])
def test_fsdp_on_a_gpu_gives_one_curve(
    precision: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """One rank over nccl: its gathers and scatters run, with nothing to share out; with and without
    recompute.
    """
    one = pool.run(
        1,
        train_tiny,
        TinyRun(
            tmp_path / "one",
            tiny_values(corpus, train={"precision": precision}),
            cache,
            device="cuda:0",
        ),
    )[0]
    for how in ("none", "block", "selective"):
        values = tiny_values(
            corpus, train={"precision": precision, "recompute": how}, devices={"strategy": "fsdp"}
        )
        found = pool.run(
            1, train_tiny, TinyRun(tmp_path / how, values, cache, device="cuda:0"), backend="nccl"
        )[0]
        np.testing.assert_allclose(
            found.losses, one.losses, rtol=1e-11 if precision == "f64" else 5e-3
        )


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_exact_has_one_hash_on_a_gpu(
    precision: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """One rank, two and three over Gloo, and two replicas, all on this GPU; and twice the same."""
    found = []
    for number, (strategy, world) in enumerate(
        (("single", 1), ("single", 1), ("ddp", 2), ("ddp", 3), ("dp", 2))
    ):
        values = tiny_values(
            corpus,
            train={"precision": precision, "exact": True, "hash_every": 10},
            devices={"use": f"cpu:{world}", "strategy": strategy},
        )
        outcome = pool.run(
            1 if strategy == "dp" else world,
            train_tiny,
            TinyRun(tmp_path / f"{number}", values, cache, device="cuda:0"),
        )[0]
        found.append((outcome.hashes, outcome.losses))
    assert all(one == found[0] for one in found)


@pytest.mark.gpu_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shape_alone_chooses_a_products_kernel(dtype: torch.dtype) -> None:
    """Whatever was computed before, and wherever in memory: forward, and the weight's gradient."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

    def kernels(rows: torch.Tensor, weight: torch.Tensor) -> tuple[set[str], list[torch.Tensor]]:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            products = [rows @ weight, rows.T @ (rows @ weight)]
            torch.cuda.synchronize()
        on_gpu = (one for one in profiler.events() if one.device_type == DeviceType.CUDA)
        return {one.name for one in on_gpu}, products

    for samples in (1, 3, 8, 64):
        rows, weight = random(samples * 128, 768), random(768, 3072)
        kernels(rows, weight)  # takes workspaces
        first, products = kernels(rows, weight)
        assert first
        random(5 * samples * 128, 768) @ weight
        held = random(12345)  # so that the next lie elsewhere
        again, same = kernels(rows.clone(), weight.clone())
        assert again == first
        assert all(map(torch.equal, products, same))
        del held


def test_the_estimate_is_near_what_the_gpu_holds(corpus: Path, tmp_path: Path) -> None:
    """26M parameters at sequence 256: the plan's sum against the allocator's peak."""
    (tmp_path / "large.yaml").write_text(f"""\
model: {{hidden_size: 512, num_layers: 8, num_heads: 8, intermediate_size: 1408, max_seq_len: 256}}
data: {{source: {corpus}, eval_samples: 1}}
batch: {{samples: 8}}
train: {{steps: 4}}
devices: {{use: "0"}}
""")
    samecurve("train", "-f", "large.yaml", "--save-dir", "run", cwd=tmp_path)
    last = read_events(tmp_path / "run/journal.jsonl")[-1].values
    assert 0.6 < max(last["memory_bytes_by_device"]) / last["memory_estimate_bytes"] < 1.05


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon", "adamw8bit"])
def test_steps_do_not_wait_for_the_gpu(optimizer: str, corpus: Path, cache: Path) -> None:
    """torch raises an error where the host would wait; the first step may (its checks), and figures
    are read when the next one is queued.
    """
    config = config_of(
        tiny_values(
            corpus,
            model={"hidden_size": 128},
            optimizer={"name": optimizer},
            train={"precision": "bf16", "steps": 6},
            devices={"strategy": "single"},
        )
    )
    device, task = torch.device("cuda:0"), ragged_task(config, cache)
    made = plan(config, MACHINE, task.facts())
    engine = TorchEngine(task, made, config.optimizer, Comm(), [device])
    state = engine.init()
    try:
        for step, batch in Feed(made, range(1), task.train_data(), None, engine.stage):
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            state, stats = engine.step(state, batch, 1e-3, [0] * 4)
            torch.cuda.set_sync_debug_mode("default")
            stats.read()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu_kernels
@pytest.mark.parametrize("file", ["small", "large"])
def test_attention_takes_the_flash_kernel(file: str) -> None:
    """At the models' own heads and length, as the block calls it under bf16 autocast, forward and
    backward: no other kernel is allowed.
    """
    fields = LanguageModel(
        **yaml.safe_load((Path(__file__).parents[2] / f"models/{file}.yaml").read_text())["model"]
    )
    block, x = (
        Block(fields).to("cuda"),
        torch.randn(2, fields.max_seq_len, fields.hidden_size, device="cuda", requires_grad=True),
    )
    cos, sin = rotary(fields.max_seq_len, fields.head_size, fields.rope_theta, x)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), torch.autocast("cuda", dtype=torch.bfloat16):
        torch.autograd.backward(block(x, cos, sin).square().mean())
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_all_logits_are_never_on_the_gpu() -> None:
    """32,768 rows over 32,000 would be 4 GB in f32; forward and backward stay under 1.2 GB, beside
    what other tests of this process have left.
    """
    gc.collect()
    before = torch.cuda.memory_allocated()
    head, rows = (
        Head(256, 32_000).to("cuda"),
        torch.randn(32_768, 256, device="cuda", requires_grad=True),
    )
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = head(rows, torch.randint(0, 32_000, (32_768,), device="cuda"))
    torch.autograd.backward(loss)
    assert torch.cuda.max_memory_allocated() - before < 1.2e9


@pytest.mark.gpu_kernels
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_compiled_blocks_give_one_curve(
    strategy: str, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    one = pool.run(
        1, train_tiny, TinyRun(tmp_path / "one", tiny_values(corpus), cache, device="cuda:0")
    )[0]
    values = tiny_values(corpus, train={"compile": True}, devices={"strategy": strategy})
    found = pool.run(
        1, train_tiny, TinyRun(tmp_path / strategy, values, cache, device="cuda:0"), backend="nccl"
    )[0]
    np.testing.assert_allclose(found.losses, one.losses, rtol=1e-10)


@pytest.mark.gpu_kernels
def test_products_in_eight_bits_learn(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed (the extra fp8)")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products in eight bits")
    write_config(tmp_path, corpus)
    done = samecurve(
        "train",
        "-f",
        "tiny.yaml",
        "--devices",
        "0",
        "--dtype",
        "bf16",
        "--compile",
        "--set",
        "train.float8=true",
        "--set",
        "model.intermediate_size=64",
        "--save-dir",
        "run",
        cwd=tmp_path,
        timeout=600,
    )
    assert "results change" in done.stdout + done.stderr
    found = losses(tmp_path / "run")
    assert np.mean(found[-5:]) < 0.9 * np.mean(found[:5])
