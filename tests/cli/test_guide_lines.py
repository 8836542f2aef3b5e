"""Every command line of the five guides, planned on the machines that the guides name.

A line is typed as its guide has it; the scripts say what they add to it. Nothing is trained: the
plan is the one of `plan --machine`. Each line is planned, or refused with flags that work.
"""

import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from samecurve import probe
from samecurve.cli import main as cli_main
from samecurve.cli import standalone
from samecurve.cli.load_config import load_config
from samecurve.cli.main import find_verb
from samecurve.cli.options import dashes
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.plan import Plan
from samecurve.errors import UserError
from samecurve.observe.plan_text import banner
from samecurve.tasks import entry_of
from samecurve_products.lab.simulation.cluster import Cluster, read_cluster
from samecurve_products.lab.simulation.forecast import plan_on_cluster
from samecurve_products.sensors.synthetic import write_files

ROOT = Path(__file__).parents[2]
CARDS = {24: "RTX4090", 40: "A100 40GB", 80: "H100"}  # GB of memory -> a card
MACHINES = [(count, memory) for count in (2, 4, 8) for memory in CARDS]

OXIDIZR = """\
samecurve -f models/nano.yaml --gpus 0,1
samecurve -f models/nano.yaml --gpus 0,1,2
samecurve -f models/nano.yaml --gpus 0,1,2,3
samecurve -f models/nano.yaml --gpus 2,3
CUDA_VISIBLE_DEVICES=2,3 samecurve -f models/nano.yaml --gpus 0,1
samecurve -f models/nano.yaml --gpus 0,1 --sync-backend cpu
samecurve -f models/nano.yaml --gpus 0,1 --sync-backend nccl --dtype bf16 --prefetch 4
samecurve -f models/nano.yaml --gpus 0,1 -d tokens.bin --set model.vocab_size=256
samecurve -f models/nano.yaml --seq-len 256 --batch-size 2 --grad-accum 4 --max-steps 100
samecurve -f models/nano.yaml --max-steps 0 --epochs 2 --headless
samecurve -f models/nano.yaml --resume auto --max-checkpoints 3
samecurve -f models/large.yaml
samecurve -f models/large.yaml --gpus 0,1,2,3,4,5,6,7
"""
ONETRAINER = """\
python scripts/train_multi_gpu.py --config-path=your_config.json --num-gpus=2 \
--distributed-backend=nccl
python scripts/train_multi_gpu.py --config-path=your_config.json --num-gpus=0 --spawn \
--port 29500 --distributed-data-loading
python scripts/train_multi_gpu.py --config-path your_config.json --num-gpus 0 --spawn \
--port 29500 --distributed-data-loading
torchrun --nproc_per_node=2 scripts/train_multi_gpu.py --config-path=your_config.json
python scripts/train_multi_gpu.py --config-path your_config.json --distributed-backend gloo
"""
HAR = """\
torchrun --nproc_per_node=4 scripts/main_multi_gpu.py --multi-gpu ddp --mode flatten --epochs 20 \
--batch-size 32 --lr 4e-3 --warmup-epochs 2 --num-workers 4 --save-dir checkpoints/ddp_4gpu
python scripts/main_multi_gpu.py --multi-gpu dp --gpu-ids 0,1,3
CUDA_VISIBLE_DEVICES=0,1,3 python scripts/main_multi_gpu.py --multi-gpu dp
torchrun --nproc_per_node=4 -m samecurve train -f models/har.yaml --multi-gpu ddp
samecurve train -f models/har.yaml --multi-gpu dp
python scripts/main_multi_gpu.py --mode average --grad-accum-steps 4 --no-amp
python scripts/main_multi_gpu.py --mode first --scale-lr linear --weight-decay 0.01
"""
CSSM = """\
python scripts/main.py --arch vit --cssm hgru_bi --batch_size 64 --bf16 --checkpoint_dir DIR
CUDA_VISIBLE_DEVICES=0,1,2,3 python scripts/main.py --arch vit --cssm gated --batch_size 256 --bf16
python scripts/main.py --cssm no_gate
"""
LLAMA = """\
torchrun --nproc_per_node=2 scripts/run_hf_standalone.py
torchrun --nproc_per_node=4 scripts/run_hf_standalone.py
torchrun --nproc_per_node=8 scripts/run_hf_standalone.py
torchrun --nproc_per_node=8 scripts/run_fsdp_standalone.py
samecurve train -f models/llama-3.1-8b.yaml --nproc 4
samecurve train -f models/llama-3.1-8b.yaml --global-batch 64 --batch-size 1
"""
QWEN = """\
torchrun --nproc_per_node=4 scripts/run_hf_standalone.py -f models/qwen2.5-7b.yaml
torchrun --nproc_per_node=8 scripts/run_hf_standalone.py -f models/qwen2.5-7b.yaml
torchrun --nproc_per_node=4 scripts/run_fsdp_standalone.py -f models/qwen2.5-7b.yaml
torchrun --nproc_per_node=8 scripts/run_fsdp_standalone.py -f models/qwen2.5-7b.yaml --max-steps 50
"""
ONE_GPU = """\
python scripts/run_hf_standalone.py
python scripts/run_fsdp_standalone.py
"""
ALL = OXIDIZR + ONETRAINER + HAR + CSSM + LLAMA + QWEN + ONE_GPU
SHARED_OUT = {2: 80, 4: 80, 8: 40}  # for 7 or 8 billion parameters and AdamW


@dataclass(frozen=True)
class Line:
    """A command line: its words without the launcher's, and the GPUs that it names."""

    words: tuple[str, ...]
    visible: tuple[int, ...] = ()  # CUDA_VISIBLE_DEVICES
    ranks: int = 0  # of torchrun

    @property
    def least(self) -> int:
        """The GPUs that a machine must have for torchrun or CUDA_VISIBLE_DEVICES."""
        return max([self.ranks, *(index + 1 for index in self.visible)])

    @property
    def named(self) -> list[int]:
        """The indices of the GPUs that a flag names."""
        flags = dict(pairwise(self.words))
        indices = flags.get("--gpus") or flags.get("--gpu-ids")
        if indices:
            return [int(index) for index in indices.split(",")]
        count = flags.get("--nproc") or ("2" if "--num-gpus=2" in self.words else "0")
        return list(range(int(count)))

    def taken(self, count: int) -> int:
        """The GPUs that the line trains on, where there are so many."""
        if not self.ranks and self.words[0].endswith("_standalone.py"):
            return 1  # a plain start of Python
        return len(self.named) or self.ranks or len(self.visible) or count


def read_line(text: str) -> Line:
    words = shlex.split(text)
    visible: tuple[int, ...] = ()
    if words[0].startswith("CUDA_VISIBLE_DEVICES="):
        visible = tuple(map(int, words.pop(0).partition("=")[2].split(",")))
    program = words.pop(0)
    if program == "samecurve":
        return Line(("samecurve", *words), visible)
    if program == "python":
        return Line(tuple(words), visible)
    assert program == "torchrun", text
    ranks = int(words.pop(0).partition("=")[2])
    return Line(tuple(words[1:] if words[0] == "-m" else words), visible, ranks)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path) -> Path:
    """A directory with what the lines name, and small data."""
    monkeypatch.chdir(tmp_path)
    for name in ("models", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "corpus.txt").write_text(corpus.read_text() * 20)
    np.arange(100_000, dtype=np.uint32).__mod__(256).tofile(tmp_path / "tokens.bin")
    (tmp_path / "har").mkdir()
    write_files(tmp_path / "har", windows_each=1)
    fork = {"enable_multi_gpu": True, "distributed_backend": "nccl", "learning_rate": 1e-5}
    fork |= {"learning_rate_scaling": True, "batch_size": 4, "gradient_accumulation_steps": 2}
    (tmp_path / "your_config.json").write_text(json.dumps({**fork, "epochs": 2}))
    return tmp_path


def small_data(config: str) -> list[str]:
    """Flags for data that are read in a moment. They change no memory but that of the data."""
    ragged = f"task={ROOT / 'examples/ragged.py'}:Ragged"
    flags = {
        "nano": ["data.source=corpus.txt"],
        "large": ["data.source=corpus.txt", "data.tokenizer=bytes", "model.vocab_size=32000"],
        "har": ["data.source=har"],
        "cssm": ["data.samples=20", "model.depth=1"],
        "your_config": [ragged, "model={width: 8, depth: 1}", "data={samples: 95, held_out: 10}"],
    }
    return flags.get(config, [])


class Planner:
    """Plans lines on machines; the facts of each model are read once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self._monkeypatch = monkeypatch
        self._cache = cache
        self._facts: dict[str, Facts] = {}

    def plan(self, line: Line, cluster: Cluster, *more: str) -> Plan:
        """UserError: the line is refused there."""
        with self._monkeypatch.context() as patches:
            words = [*self._arguments(line, cluster, patches), *more]
        train = find_verb("train")
        flags = train.make_context("train", words, token_normalize_func=dashes).params
        settings = small_data(Path(flags["file"]).stem)
        if "-d" in line.words:
            settings = []
        config = load_config({**flags, "settings": (*settings, *flags["settings"])}, say=False)
        taken = len(line.visible) or line.ranks or cluster.num_devices
        return plan_on_cluster(config.config, self._facts_of(config.config), cluster.of(taken))

    def _arguments(self, line: Line, cluster: Cluster, patches: pytest.MonkeyPatch) -> list[str]:
        """The arguments of `samecurve train`, as the line's script makes them."""
        program, *words = line.words
        if program == "samecurve":
            return words[1:] if words[0] == "train" else words
        made: list[list[str]] = []
        for module in (cli_main, standalone):
            patches.setattr(module, "main", lambda: made.append(sys.argv[2:]))
        found = probe.Gpus("NVIDIA", cluster.machine.devices, "CUDA_VISIBLE_DEVICES")
        patches.setattr(probe, "find_gpus", lambda _environment: found)
        patches.setattr(sys, "argv", list(line.words))
        if line.ranks:
            patches.setenv("TORCHELASTIC_RUN_ID", "none")
        runpy.run_path(program, run_name="__main__")
        return made[0]

    def _facts_of(self, config: Config) -> Facts:
        model, data = (section.model_dump(mode="json") for section in (config.model, config.data))
        key = json.dumps([config.task, config.engine, model, data], default=str)
        if key not in self._facts:
            # whether an exact run would refuse is not the question here, and takes seconds at 8B
            ordinary = config.with_values(train={"exact": False})
            self._facts[key] = entry_of(config.task).facts(ordinary, str(self._cache))
        return self._facts[key]


@pytest.fixture
def planner(home: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Planner:
    del home
    return Planner(monkeypatch, cache)


def check_lines(
    planner: Planner,
    lines: str,
    needs: dict[int, int],
    *,
    machines: Sequence[tuple[int, int]] = MACHINES,
    adapters: bool = False,
) -> None:
    """Each line is planned where each GPU has what it needs, else refused with flags that work.

    needs: number of GPUs that the line takes -> GB that each must have
    machines: number of GPUs, and GB of each
    """
    for text in lines.splitlines():
        line = read_line(text)
        for count, memory in machines:
            if line.least > count:
                continue
            cluster, taken = read_cluster(f"{count}x{CARDS[memory]}"), line.taken(count)
            if max(line.named, default=0) >= count:
                with pytest.raises(UserError, match=r"GPU .* not exist"):
                    planner.plan(line, cluster)
            elif memory >= needs.get(taken, 24):
                assert planner.plan(line, cluster).layout.num_devices == taken, text
            else:
                with pytest.raises(UserError, match="need") as refused:
                    planner.plan(line, cluster)
                check_remedy(planner, line, cluster, refused.value.remedy, adapters=adapters)


def check_remedy(
    planner: Planner, line: Line, cluster: Cluster, remedy: str, *, adapters: bool = False
) -> None:
    """The line with the flags of each way that the remedy names is planned.

    adapters: also those that train an adapter, whose model must be described anew
    """
    if "a device with more memory" in remedy:  # nothing fits here
        return
    ways = re.findall(r"((?:--(?:set|strategy) \S+ ?)+)", remedy)
    assert ways, remedy
    for flags in ways:
        if "model.adapter" in flags and not adapters:
            continue
        assert planner.plan(line, cluster, *flags.split()).layout.num_devices >= 1


def test_the_lines_for_small_models_are_planned_on_the_smallest_machines(
    planner: Planner,
) -> None:
    machines = [(count, min(CARDS)) for count in (2, 4, 8)]
    check_lines(planner, OXIDIZR + ONETRAINER + HAR, {}, machines=machines)


@pytest.mark.long
def test_the_lines_for_small_models_and_jax_are_planned_on_any_machine_of_the_guides(
    planner: Planner,
) -> None:
    """Long: 200 plans more, which only larger GPUs tell from those above; and jax is imported."""
    check_lines(planner, OXIDIZR + ONETRAINER + HAR + CSSM, {})


def test_the_lines_for_8b_are_planned_where_they_fit_and_else_refused_with_flags_that_work(
    planner: Planner,
) -> None:
    """TPrimat's own line, on its own machine: eight GPUs of 80 GB."""
    check_lines(planner, LLAMA, SHARED_OUT)
    check_lines(planner, ONE_GPU, {1: 1000})
    for machine, taken in (("8xH100", "fsdp"), ("8xH200", "ddp")):
        line = read_line("torchrun --nproc_per_node=8 scripts/run_hf_standalone.py")
        plan = planner.plan(line, read_cluster(machine))
        (said,) = (row for row in banner(plan) if row.startswith("       strategy "))
        assert said.startswith(f"       strategy {taken} (auto): ")
        assert re.search(r"126\.\d GiB", said)
        with_ddp = ("--strategy", "ddp")
        if taken == "ddp":
            assert planner.plan(line, read_cluster(machine), *with_ddp).layout.strategy == "ddp"
            continue
        with pytest.raises(UserError, match=r"need 126\.\d GiB on each device") as refused:
            planner.plan(line, read_cluster(machine), *with_ddp)
        needed = re.findall(r"need (\S+ GiB)", refused.value.cause)[0]
        for page in (ROOT / "docs/examples.md", ROOT / "docs/coming-from-tprimat.md"):
            assert needed in page.read_text(encoding="utf-8")
        assert "--strategy fsdp shares the state out (28." in refused.value.remedy
        assert "--strategy auto takes what fits" in refused.value.remedy
        check_remedy(planner, line, read_cluster(machine), refused.value.remedy)


@pytest.mark.long
def test_the_lines_for_qwen_are_planned_too_and_adapters_fit_as_the_remedies_say(
    planner: Planner,
) -> None:
    """Long: three more models of 7 and 8 billion parameters. The test above holds the promise."""
    check_lines(planner, QWEN, SHARED_OUT, adapters=True)
    check_lines(planner, LLAMA + ONE_GPU, {**SHARED_OUT, 1: 1000}, adapters=True)


def test_every_line_of_the_guides_pages_and_scripts_is_planned_here() -> None:
    scripts = [ROOT / "scripts" / name for name in os.listdir(ROOT / "scripts")]
    names = ("oxidizr", "onetrainer", "har", "jax-pmap", "tprimat")
    pages = [ROOT / "docs" / f"coming-from-{name}.md" for name in names]
    typed = re.compile(
        r"^(?:CUDA_VISIBLE_DEVICES=\S+ )?(?:torchrun|python) .*scripts/.*\.py.*", re.M
    )
    found = set()
    for file in (*scripts, *pages, ROOT / "README.md"):
        text = re.sub(r"\n {4}(?=--)", " ", file.read_text(encoding="utf-8"))
        lines = (re.split(r" {2,}", line)[0].strip() for line in typed.findall(text))
        found |= {line for line in lines if "check_multi_gpu" not in line}
    assert len(found) > 8
    assert found - set(ALL.splitlines()) == set()
