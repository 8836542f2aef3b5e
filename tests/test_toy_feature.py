"""A feature is one folder: that of the recipe in CONTRIBUTING.md, in a package of somebody else.

No file of ours is edited: the package is found by its entry point.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from samecurve.core import entry_points, feature_list
from samecurve.core.config.loading import config_class
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan as make_plan
from samecurve.errors import InvalidConfigError, UserError
from samecurve.observe.plan_table import table
from test_recipes import RECIPES, new_files
from tiny import FACTS, MACHINE, Outcome, TinyRun, config_of, tiny_values, train_tiny
from worlds import Pool

HOME = "src/samecurve/features/"
LIMIT = 0.02
MORE = ("fsdp:2", "jax-dp:2")  # whose programs take seconds to start


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages, with the recipe's."""
    for path, text in new_files(RECIPES["a feature"]):
        file = tmp_path / "site/their_package" / path.removeprefix(HOME)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    about = tmp_path / "site/their_package-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[samecurve.features]\nweight_limit = their_package.weight_limit\n"
    )
    return tmp_path / "site"


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """With this folder among those that Python imports from."""
    sys.path.insert(0, str(site))
    forget_installed()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        for name in [name for name in sys.modules if name.startswith("their_package")]:
            del sys.modules[name]
        forget_installed()


def forget_installed() -> None:
    entry_points.installed.cache_clear()
    feature_list.listed_and_installed.cache_clear()
    config_class.cache_clear()


def planned(**values: Any) -> Plan:
    config = config_of({**tiny_values(Path("text.txt"), train={"weight_limit": LIMIT}), **values})
    return make_plan(config, MACHINE, FACTS)


def test_an_installed_package_brings_a_key_a_line_of_the_plan_and_memory(site: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"train\.weight_limit: unknown key"):
        planned()
    with installed(site):
        made, with_jax = planned(), planned(engine="jax")
        assert made.features == {"weight_limit": LIMIT}
        assert "weights within 0.02 of 0, after each update" in table(made, {})
        assert [term.bytes for term in with_jax.memory if term.name == "limit"] == [4 * 8]
        assert not [term for term in made.memory if term.name == "limit"]
        on_disk = json.loads(json.dumps(made.to_json()))
        assert on_disk["weight_limit"] == LIMIT
        assert Plan.from_json(on_disk) == made
        with pytest.raises(InvalidConfigError, match="greater than or equal to 0"):
            config_of(tiny_values(Path("text.txt"), train={"weight_limit": -1.0}))


def train_installed(index: int, group: dist.ProcessGroup, run: TinyRun, site: Path) -> Outcome:
    with installed(site):
        return train_tiny(index, group, run)


@pytest.mark.parametrize(
    "layout", ["ddp:2", *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
)
def test_a_step_of_either_engine_has_its_hook(
    *, layout: str, site: Path, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    strategy, _, count = layout.partition(":")
    engine = "jax" if strategy.startswith("jax-") else "torch"
    values = tiny_values(
        corpus,
        train={"steps": 4, "weight_limit": LIMIT},
        devices={"use": f"cpu:{count}", "strategy": strategy.removeprefix("jax-")},
    )
    job = TinyRun(tmp_path, {**values, "engine": engine}, cache)
    results = pool.run(1 if engine == "jax" else int(count), train_installed, job, site)
    arrays = [array for name, array in results[0].arrays.items() if name.startswith("model/")]
    largest = max(float(np.abs(array).max()) for array in arrays)
    assert largest == pytest.approx(LIMIT)


GRADIENT_LIMIT = {
    "__init__.py": """
from pydantic import Field
from samecurve.core.config import Section
from samecurve.core.feature import Feature
from samecurve.core.planning import Decision

class Fields(Section):
    gradient_limit: float = Field(0.0, ge=0, description="most of a gradient's number")

class GradientLimit(Feature):
    fields, value, hooks = Fields, float, ("torch", "jax")

    def decide(self, planned):
        return Decision(planned.config.train.gradient_limit or None, {"gradient_limit": "as given"})

FEATURE = GradientLimit()
""",
    "torch_hooks.py": """
from samecurve.torch_engine.step.feature_hooks import TorchHooks

class Hooks(TorchHooks):
    def add_to(self, steps):
        for step in steps:
            step.before_update.append(self.cut)

    def cut(self, gradients):
        for gradient in gradients:
            gradient.clamp_(-self.value, self.value)
""",
    "jax_hooks.py": """
import jax.numpy as jnp
from samecurve.jax_engine.feature_hooks import JaxHooks

class Hooks(JaxHooks):
    def before_update(self, gradients):
        return {name: jnp.clip(one, -self.value, self.value) for name, one in gradients.items()}
""",
}


def test_hooks_that_are_listed_and_not_written_are_named(site: Path) -> None:
    home = site / "their_package/weight_limit"
    (home / "jax_hooks.py").unlink()
    with installed(site):
        assert list(feature_list.hooks_of({"weight_limit": LIMIT}, "torch"))
        with pytest.raises(UserError, match=r"no module their_package\.weight_limit\.jax_hooks"):
            list(feature_list.hooks_of({"weight_limit": LIMIT}, "jax"))


@pytest.mark.parametrize(
    "layout", ["ddp:2", *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
)
def test_a_feature_changes_the_gradients_of_either_engine(
    *, layout: str, site: Path, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """SGD at a rate of 1: no weight moves farther in a step than the limit."""
    home = site / "their_package/gradient_limit"
    home.mkdir()
    for name, text in GRADIENT_LIMIT.items():
        (home / name).write_text(text)
    points = site / "their_package-1.dist-info/entry_points.txt"
    points.write_text("[samecurve.features]\ngradient_limit = their_package.gradient_limit\n")
    strategy, _, count = layout.partition(":")
    engine = "jax" if strategy.startswith("jax-") else "torch"

    def weights_after(steps: int, limit: float) -> dict[str, Any]:
        values = tiny_values(
            corpus,
            train={"steps": steps, "gradient_limit": limit},
            optimizer={"name": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0},
            schedule={"decay": "constant", "warmup": 0},
            devices={"use": f"cpu:{count}", "strategy": strategy.removeprefix("jax-")},
        )
        run = TinyRun(tmp_path / f"{steps}-{limit}", {**values, "engine": engine}, cache)
        ranks = 1 if engine == "jax" else int(count)
        arrays = pool.run(ranks, train_installed, run, site)[0].arrays
        return {name: array for name, array in arrays.items() if name.startswith("model/")}

    one, two = weights_after(1, LIMIT), weights_after(2, LIMIT)
    moved = max(float(np.abs(two[name] - one[name]).max()) for name in one)
    assert moved == pytest.approx(LIMIT)
