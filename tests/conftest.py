import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import worlds
from commands import samecurve, write_config
from samecurve.cli.main import let_threads_wait
from samecurve.launch.pool import pool as warm_pool
from warm_commands import warm_servers

if TYPE_CHECKING:
    from s3_server import S3

let_threads_wait()  # before a test imports torch
gc.disable()  # until the tests are collected: they stay, so that looking for garbage finds none

# Most of a small jax run is compiling. XLA's emitters of fusions take half of that time.
QUICKLY_COMPILED = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false"
)


@pytest.fixture(scope="session", autouse=True)
def _servers() -> Iterator[None]:
    with warm_servers():
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[worlds.Pool]:
    with warm_pool(worlds.SIZE, libraries=("transformers.modeling_utils", "peft")) as ranks:
        yield ranks


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the session's own, so that no test finds what an older one left."""
    home = tmp_path_factory.mktemp("cache")
    os.environ["SAMECURVE_CACHE"] = str(home)
    return home


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some text that is the same everywhere: the squares and their spelling."""
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_text(
        "".join(
            f"the square of {i} is {i * i}, and of {i + 1} it is {(i + 1) ** 2};\n"
            for i in range(60)
        )
    )
    return path


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator["S3"]:
    """A server of objects with an empty bucket."""
    from s3_server import s3_server

    with s3_server(tmp_path_factory.mktemp("s3") / "log") as running:
        yield running


@pytest.fixture(scope="session")
def unbroken_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of 60 steps with torch in one process, never stopped."""
    home = tmp_path_factory.mktemp("unbroken")
    done = samecurve("train", "-f", write_config(home, corpus), "--save-dir", "run", cwd=home)
    assert "done   step 60  60 steps" in done.stdout
    assert "single-token entropy of the corpus" in done.stdout
    return home / "run"


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny pipeline of each family, as diffusers saves it."""
    import tiny_pipelines  # and with it torch and diffusers

    root = tmp_path_factory.mktemp("pipelines")
    return {
        name: getattr(tiny_pipelines, f"save_{name}")(root / name) for name in tiny_pipelines.ALL
    }


@pytest.fixture(scope="session")
def single_files(pipelines: dict[str, Path]) -> dict[str, Path]:
    """Two of these pipelines as one file each, in the layout of the models' authors."""
    import original_files

    return {
        name: original_files.save_original(
            pipelines[name], pipelines[name].with_suffix(".safetensors"), attended_ups=ups
        )
        for name, ups in original_files.OF_ONE_FILE.items()
    }


def pytest_configure(config: pytest.Config) -> None:
    """make test-long compiles as a user's run does."""
    if "long" not in (config.option.markexpr or ""):
        os.environ.setdefault("XLA_FLAGS", QUICKLY_COMPILED)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`gpu` tests skip without a GPU, `gpu_kernels` ones also on an emulated one, saying so; `long`
    ones run only in make test-long.

    By their marks: keywords also hold the names of folders above.
    """
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
    elif os.environ.get("EMULATED_CUDA") == "1":
        for item in on_gpu:
            if item.get_closest_marker("gpu_kernels"):
                item.add_marker(pytest.mark.skip(reason="an emulated GPU runs the CPU's kernels"))
    if "long" not in (config.option.markexpr or ""):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_report_header(config: pytest.Config) -> list[str]:
    if "long" in (config.option.markexpr or ""):
        return []
    return ["long tests are left out: make test-long runs them"]


def pytest_collection_finish() -> None:
    """What the session keeps (items, modules: a million objects) is no garbage: each full
    collection would take 0.7 s for a look at them.
    """
    gc.freeze()
    gc.enable()


def _has_gpu() -> bool:
    import torch  # takes seconds, and most files' tests need none

    return torch.cuda.is_available()
