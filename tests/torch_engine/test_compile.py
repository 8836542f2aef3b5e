"""train.compile: blocks by themselves, one program for all that are alike, whatever is in them; the
results are those of the model as written.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from commands import losses, samecurve, write_config
from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.planning.planner import plan
from samecurve.features.compile.blocks import compile_model
from samecurve.features.norm_sync.batch_norm import synchronise_batch_norms
from samecurve.features.recompute.torch_hooks import recompute
from samecurve.tasks import open_task
from samecurve.torch_engine.model.model_setup import seeded
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.randomness import MicroBatchContext, StagedKeys
from samecurve.torch_engine.randomness.dropout_layers import key_dropout
from samecurve.torch_engine.strategies.sharded.group import WeightGroup
from samecurve.torch_engine.strategies.sharded.strategy import Sharded
from samecurve.torch_engine.strategies.sharded.sums import RoundSums
from samecurve_products.text.language import LanguageModel
from samecurve_products.text.language.torch_task import Decoder
from tiny import MACHINE, config_of, tiny_values
from worlds import Pool

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's compiler looks at it itself
FIELDS = LanguageModel(
    hidden_size=16,
    num_layers=4,
    num_heads=2,
    intermediate_size=16,
    max_seq_len=8,
    tie_embeddings=True,
)


def programs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def decoder() -> Decoder:
    with seeded(1):
        return Decoder(FIELDS, 40).double()


def gradients(model: nn.Module, tokens: torch.Tensor) -> list[Any]:
    loss = model(tokens, tokens)
    return [loss, *torch.autograd.grad(loss, [*model.parameters()])]


@pytest.mark.parametrize("how", ["none", "block", "selective"])
def test_alike_blocks_share_a_program_for_each_shape(how: Any) -> None:
    """Four blocks: one program for a full microbatch, one more for a short one; so for the head.

    Kernels are not made of it here: that takes a minute.
    """
    plain, compiled = decoder(), decoder()
    recompute(plain, how)
    if how == "selective":
        recompute(compiled, how)
    compile_model(compiled, "eager")
    if how == "block":
        recompute(compiled, how)
    assert [name for name, _ in compiled.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    tokens = torch.arange(24).view(3, 8)
    before = programs()
    for rows, most in ((3, 2), (2, 3), (3, 3)):
        for found, expected in zip(
            gradients(compiled, tokens[:rows]), gradients(plain, tokens[:rows]), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        assert programs() - before <= most


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", x + self.drop(torch.tanh(self.linear(self.norm(x)))))


def test_masks_that_follow_the_sample_and_synchronised_norms_stay_what_they_are() -> None:
    """Each module has a name and a number of its own there, which must not make a program each."""
    found = []
    for compiled in (False, True):
        context = MicroBatchContext(torch.device("cpu"))
        with seeded(2):
            model = nn.Sequential(*(Part() for _ in range(5))).double()
        synchronise_batch_norms(model, Comm(), context)
        key_dropout(model, context, 7)
        if compiled:
            compile_model(model, "eager")
        before, steps = programs(), []
        for ids in (np.arange(4), np.arange(4, 8)):
            context.begin(StagedKeys(RowKeys(0, 0, 0, ids)))
            out = model(torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6))
            steps += [out, *torch.autograd.grad(out.square().sum(), [*model.parameters()])]
        found.append(steps)
    assert 0 < programs() - before <= 4  # a block is cut where a norm and a mask are
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def sharded_step(
    _index: int, group: Any, precision: str, corpus: Path, cache: Path
) -> tuple[int, int, list[str]]:
    """A rank's programs and graph breaks in two steps of the decoder under fsdp, and the order in
    which the second one begins to gather weights and to sum gradients.
    """
    config = config_of(
        tiny_values(
            corpus,
            devices={"use": "cpu:2", "strategy": "fsdp", "preflight": 0},
            train={"precision": precision, "steps": 1},
        )
    )
    made = plan(config, MACHINE, open_task(config, str(cache)).facts())
    strategy = Sharded(made, Comm(group), [torch.device("cpu")])
    with seeded(1):
        model = Decoder(FIELDS, 40)
    compile_model(model, "eager")
    counters = torch._dynamo.utils.counters
    counters.clear()
    strategy.distribute([model], lambda _: None)
    tokens, order = torch.arange(24).view(3, 8), list[str]()
    microbatch: Any = SimpleNamespace(real=3)
    with pytest.MonkeyPatch.context() as patch:
        for kind, name, word in ((WeightGroup, "start", "gathers"), (RoundSums, "send", "sums")):
            patch.setattr(kind, name, noted(getattr(kind, name), word, order))
        for _ in range(2):
            order.clear()
            strategy.begin_step([], 1)
            strategy.begin_microbatch(0, microbatch, is_last=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = strategy.train(0, Decoder.__call__, tokens, tokens)
            loss.backward()
            strategy.end_microbatch(0, microbatch)
    strategy.close()
    return programs(), sum(counters["graph_break"].values()), order


def noted(function: Any, word: str, order: list[str]) -> Any:
    """The method, which notes that it begins with a group. What is on its way begins nothing."""

    def noting(owner: Any, *arguments: Any) -> None:
        of: Any = arguments[0] if arguments else owner
        if word == "sums" or of._pending is None:
            order.append(f"{word} {of.title}")
        function(owner, *arguments)

    return noting


@pytest.mark.parametrize("precision", ["bf16", pytest.param("f32", marks=pytest.mark.long)])
def test_a_sharded_block_is_one_program_and_is_gathered_ahead(
    precision: str, pool: Pool, corpus: Path, cache: Path
) -> None:
    """The hooks of fsdp lie outside of the program. The last block stays whole for backward. While
    a block computes its gradients, the next one is gathered, and the one before is summed.
    """
    numbers = range(FIELDS.num_layers)
    backward = ["gathers layers.2"]
    for number in reversed(numbers[1:]):
        ahead = [f"gathers layers.{number - 2}"] if number > 1 else []
        backward += [f"sums layers.{number}", *ahead]
    for count, breaks, order in pool.run(2, sharded_step, precision, corpus, cache):
        assert (count, breaks) == (2, 0)  # one for a block, one for the head
        assert order == [
            "gathers the model",
            *(f"gathers layers.{number}" for number in numbers),
            *backward,
            "sums the model",
            "sums layers.0",
        ]


def test_ever_other_shapes_are_an_error() -> None:
    """Not a silent return to what is slow."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    compile_model(model, "eager")
    with pytest.raises(FailOnRecompileLimitHit, match="recompile_limit"):
        [model(torch.ones(rows, 3)) for rows in range(2, 40)]


def test_without_it_nothing_of_the_compiler_is_imported() -> None:
    """Its import takes every rank seconds."""
    work = (
        "import sys, torch\nimport samecurve.torch_engine.engine\n"
        "from samecurve_products.text.language.torch_task import Decoder\n"
        "from samecurve_products.text.language import LanguageModel\n"
        "made = Decoder(LanguageModel(hidden_size=16, num_layers=2, num_heads=2), 40)\n"
        "made(*[torch.zeros(1, 8, dtype=torch.int64)] * 2).backward()\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", work], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


@pytest.mark.long
@pytest.mark.parametrize("how", ["none", "block"])
def test_verify_passes_compiled(how: str, corpus: Path, tmp_path: Path) -> None:
    """The whole compiler, on threads, ranks, shards, with tails of three sizes."""
    done = samecurve(
        "verify",
        "-f",
        write_config(tmp_path, corpus),
        "--compile",
        "--layouts",
        "single,dp:2,ddp:3,fsdp:2,ddp:2..fsdp:2",
        "--steps",
        "4",
        "--set",
        f"train.recompute={how}",
        cwd=tmp_path,
        timeout=1200,
    )
    assert "PASS   all 5 layouts" in done.stdout
    assert "leaked" not in done.stderr


@pytest.mark.long
def test_a_compiled_run_has_the_losses_of_one_as_written(corpus: Path, tmp_path: Path) -> None:
    """Epochs with short tails, evaluations, samples, a stop and a resume; recompute; one block, so
    the whole model.
    """
    write_config(tmp_path, corpus, steps=30, save=10)
    samecurve("train", "-f", "tiny.yaml", "--devices", "cpu", "--save-dir", "plain", cwd=tmp_path)
    samecurve(
        "train",
        "-f",
        "tiny.yaml",
        "--devices",
        "cpu",
        "--save-dir",
        "compiled",
        "--compile",
        "--stop-after",
        "15",
        cwd=tmp_path,
        timeout=600,
    )
    samecurve(
        "train",
        "-f",
        "tiny.yaml",
        "--devices",
        "cpu",
        "--save-dir",
        "compiled",
        "--compile",
        "--set",
        "train.recompute=selective",
        cwd=tmp_path,
        timeout=600,
    )
    np.testing.assert_allclose(
        losses(tmp_path / "compiled"), losses(tmp_path / "plain"), rtol=1e-11
    )
    for name, flags in (("one", ()), ("whole", ("--compile",))):
        samecurve(
            "train",
            "-f",
            "tiny.yaml",
            "--devices",
            "cpu",
            "--save-dir",
            name,
            "--set",
            "model.num_layers=1",
            "--max-steps",
            "8",
            "--warmup",
            "1",
            *flags,
            cwd=tmp_path,
            timeout=600,
        )
    np.testing.assert_allclose(losses(tmp_path / "whole"), losses(tmp_path / "one"), rtol=1e-11)
