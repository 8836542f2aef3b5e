"""jax set up for GPUs, as far as a CPU can show it: variables, platforms, options of programs."""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jobs
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from test_engine import small

from samecurve.core.planning.machine import Device
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan as make_plan
from samecurve.errors import UserError
from samecurve.jax_engine import runtime
from samecurve.jax_engine.array_types import PyTree
from samecurve.jax_engine.sharded_calls import shard_map
from samecurve.jax_engine.strategies import AXIS, Sharded
from samecurve.tasks import open_task
from tiny import MACHINE
from worlds import Pool

# the gradient of a weight, over many rows; on one core if there is a second argument
PRODUCT = """
import hashlib, os, sys
count, *one_core = sys.argv[1:]
if one_core:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", int(count))
x, y = np.random.default_rng(0).standard_normal((2, 2048, 64), np.float32)
print(hashlib.sha256(np.asarray(jax.jit(lambda x, y: x.T @ y)(x, y)).tobytes()).hexdigest())
"""


@pytest.fixture(scope="module")
def gpu_plan() -> Plan:
    config = jobs.config_of(small(devices="cpu:1"))
    made = make_plan(config, MACHINE, open_task(config, "").facts())
    gpu = Device(kind="cuda", index=0, name="NVIDIA H100", memory=80 << 30)
    return replace(made, layout=replace(made.layout, devices=(gpu,)))


def test_jax_may_take_what_the_plan_counts_on(gpu_plan: Plan) -> None:
    assert runtime.environment(gpu_plan, 0, {}) == {"XLA_CLIENT_MEM_FRACTION": "0.95"}
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert runtime.environment(gpu_plan, 0, {name: "0.5"}) == {}  # jax refuses both together


def test_a_run_on_the_cpu_leaves_gpus_to_the_next_one(pool: Pool) -> None:
    """In one warm rank; and a run on the CPU follows that, as it was."""
    values = small(devices="cpu:2", train={"steps": 2})
    first = pool.run(1, jobs.trained, values)[0][0]
    assert pool.run(1, jobs.platforms_of_gpus, values) == [(None, "cuda,cpu", "cuda,cpu")]
    assert pool.run(1, jobs.trained, values)[0][0] == first


def test_gpus_that_the_user_hides_from_jax_are_said(gpu_plan: Plan) -> None:
    with pytest.raises(UserError, match="JAX_PLATFORMS=cpu hides the GPUs") as refusal:
        runtime.configure(gpu_plan, 0, "", platforms="cpu")
    assert "unset JAX_PLATFORMS" in refusal.value.remedy


def test_same_programs_carry_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA knows both, and looks at them: a third is refused."""
    ones = jnp.ones((3, 3))
    np.testing.assert_array_equal(runtime.deterministic_jit(jnp.matmul)(ones, ones), ones @ ones)
    monkeypatch.setitem(runtime._DETERMINISTIC_KERNELS, "xla_gpu_nonesuch", 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_nonesuch"):
        runtime.deterministic_jit(jnp.add)(ones, ones)


@pytest.mark.parametrize("cut", [False, True])
def test_no_array_without_values_passes_into_a_program(*, cut: bool) -> None:
    """jaxlib 0.11.2 crashes where one does, on several devices, and is used."""
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
    specs = (PartitionSpec(AXIS if cut else None), {"a": PartitionSpec(AXIS), "b": PartitionSpec()})

    def program(rows: jax.Array, tree: dict[str, jax.Array]) -> tuple[jax.Array, PyTree]:
        return rows, {**tree, "sum": jax.lax.psum(tree["a"].sum() + rows.sum(), AXIS)}

    out_specs = (specs[0], {**specs[1], "sum": PartitionSpec()})
    called = shard_map(program, mesh=mesh, in_specs=specs, out_specs=out_specs)
    arguments = jnp.ones((2, 0)), {"a": jnp.ones((4, 3)), "b": jnp.zeros((0,), jnp.int32)}
    (equation,) = jax.make_jaxpr(called)(*arguments).eqns
    assert [variable.aval.shape for variable in equation.invars] == [(4, 3)]
    rows, tree = jax.jit(called)(*arguments)
    assert (rows.shape, tree["b"].shape, tree["b"].dtype) == ((2, 0), (0,), np.int32)
    assert tree["sum"] == 12


def test_no_array_is_cut_into_single_numbers_where_bits_do_not_follow_devices() -> None:
    mesh: Any = AbstractMesh((2,), (AXIS,))
    by_rows, ordinary = (Sharded(mesh, cuts_longest=longest) for longest in (True, False))
    shapes = [(2,), (1, 2), (3,), (2, 2), (0, 2), ()]
    assert [*map(by_rows.shard_shape, shapes)] == [(2,), (1, 2), (2,), (1, 2), (0, 2), ()]
    assert ordinary.shard_shape((2,)) == (1,)


def exact_plan(devices: int, *, exact: bool = True) -> Plan:
    values = small(devices=f"cpu:{devices}")
    values["train"] = {**values["train"], "exact": exact, "exact_devices": 64}
    values["batch"] = {"samples": 64}
    config = jobs.config_of(values)
    return make_plan(config, MACHINE, open_task(config, "").facts())


def test_exact_runs_have_threads_of_their_own() -> None:
    """XLA starts one a core, or one a device where these are more; a user's number stays."""
    plan = exact_plan(2)
    assert runtime.environment(plan, 0, {})["PJRT_NPROC"] == "16"
    assert "PJRT_NPROC" not in runtime.environment(plan, 0, {"PJRT_NPROC": "32"})
    assert "PJRT_NPROC" not in runtime.environment(exact_plan(2, exact=False), 0, {})
    many = exact_plan(17)
    assert "PJRT_NPROC" not in runtime.environment(many, 0, {"PJRT_NPROC": "17"})
    with pytest.raises(UserError, match="17 CPU devices in one process have more threads"):
        runtime.environment(many, 0, {})
    with pytest.raises(UserError, match="PJRT_NPROC=all is no number"):
        runtime.environment(plan, 0, {"PJRT_NPROC": "all"})


@pytest.mark.long
def test_the_same_bits_on_any_cores_and_devices() -> None:
    """Without these threads the bits follow both; so this shows that XLA still cuts sums so."""

    def digest(variables: dict[str, str], *arguments: str) -> str:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
        command = [sys.executable, "-c", PRODUCT, *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return ended.stdout

    layouts = [("1",), ("1", "on one core"), ("8",)]
    variables = runtime.environment(exact_plan(1), 0, {})
    assert len({digest(variables, *layout) for layout in layouts}) == 1
    assert len({digest({}, *layout) for layout in layouts}) > 1
