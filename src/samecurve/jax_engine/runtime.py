"""Set jax up for a plan: platform, devices, number widths, compilation cache, processes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.backend import clear_backends
from jax.stages import Wrapped

from samecurve.core.planning.memory import usable_share
from samecurve.core.planning.plan import Plan
from samecurve.core.system.installation import pip_command
from samecurve.errors import NotSameBitsError, RunError, UserError

# seconds for all processes to join; worker/preflight.py ends the waiting earlier, with a message
_JOIN_SECONDS = 86_400
# XLA's CPU devices wait for each other in memory. By default the process is aborted if one of them
# computes 40 s longer than another, which happens easily if many devices share few cores.
_NO_STUCK_TIMEOUT = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=86400",
)
# On each GPU XLA tries several kernels and takes the fastest; some kernels add in no fixed order.
_DETERMINISTIC_KERNELS = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
# The variable that sets how many threads XLA computes with on CPUs; without it one a core, or one a
# device where these are more. XLA cuts long sums into as many parts, so the number is fixed where
# bits are not to follow the devices. On two cores a step took no longer with 16 than with two.
_THREADS, FIXED_THREADS = "PJRT_NPROC", 16
# variables that set the share of a GPU that jax takes at its start; the current name first
_MEMORY_SHARE = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def environment(plan: Plan, index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to set before jax's first computation.

    index: the number of this process.
    environment: the present variables; those that the user set stay.

    UserError: more CPU devices than a fixed number of threads is enough for.
    """
    if plan.layout.devices[0].kind != "cpu":
        if any(name in environment for name in _MEMORY_SHARE):
            return {}
        share = min(usable_share(one.kind, one.memory) for one in plan.layout.devices)
        return {_MEMORY_SHARE[0]: f"{share:g}"}  # else jax takes 75 %
    flags = environment.get("XLA_FLAGS", "")
    more = [flag for flag in _NO_STUCK_TIMEOUT if flag.partition("=")[0] not in flags]
    variables = {"XLA_FLAGS": " ".join([flags, *more]).strip()} if more else {}
    if plan.compute.fixed_threads:
        _check_fixed_threads(plan, index, environment)
        variables.setdefault(_THREADS, environment.get(_THREADS, str(FIXED_THREADS)))
    return {name: value for name, value in variables.items() if environment.get(name) != value}


def _check_fixed_threads(plan: Plan, index: int, environment: Mapping[str, str]) -> None:
    """UserError: XLA would start more threads than on fewer devices, and sums have other bits; or
    the user's number of threads is none.
    """
    number = environment.get(_THREADS, str(FIXED_THREADS))
    if not number.isdigit():
        raise UserError(
            f"{_THREADS}={number} is no number of threads", f"unset {_THREADS}", _THREADS
        )
    threads = int(number)
    count = len(plan.layout.devices_of(index))
    if count > threads:
        raise NotSameBitsError(
            f"{count} CPU devices in one process have more threads than the {threads}"
            " that engine jax computes with on any number of devices, and other bits",
            f"--devices cpu:{threads}, or {_THREADS}={count} in the environment of all runs that"
            " are to be equal",
            "devices.use",
        )


def deterministic_jit(
    function: Callable[..., Any], *, donate_argnums: tuple[int, ...] = ()
) -> Wrapped:
    """jax.jit with kernels that give the same bits on each device and in each process.

    The kernels are chosen by options of the program: XLA reads its flags once a process, and an
    earlier run of the process may have set others. Only for programs that no other program calls.
    """
    return jax.jit(function, donate_argnums=donate_argnums, compiler_options=_DETERMINISTIC_KERNELS)


def configure(
    plan: Plan, index: int, cache: str, *, platforms: str, least: int = 1, anew: bool = False
) -> None:
    """Set jax up, before it computes anything.

    index: the number of this process.
    cache: a directory where compiled programs are kept from run to run.
    platforms: the platforms that the user lets jax start (JAX_PLATFORMS); '': all.
    least: the least number of CPU devices to make, for later runs of the process.
    anew: the number of threads has changed, if an earlier run of the process has started jax.

    UserError: jax may not start the plan's GPUs.
    """
    cpu = plan.layout.devices[0].kind == "cpu"
    jax.config.update("jax_enable_x64", plan.compute.precision == "f64")
    # f32 means f32, as with torch: not TF32
    products = "highest" if plan.compute.precision in {"f32", "f64"} else None
    jax.config.update("jax_default_matmul_precision", products)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if cpu:
        jax.config.update("jax_platforms", "cpu")
        if anew:
            clear_backends()
        _virtual_devices(len(plan.layout.devices_of(index)), least)
    else:
        _start_gpus(platforms)


def _start_gpus(platforms: str) -> None:
    """Start GPUs, and the CPU, on which models are made. UserError: jax may start no GPU."""
    names = list(filter(None, platforms.split(",")))
    if names == ["cpu"]:
        raise UserError(
            f"JAX_PLATFORMS={platforms} hides the GPUs that the plan has from jax",
            "unset JAX_PLATFORMS, or --devices cpu",
            "devices.use",
        )
    wanted = ",".join(names if "cpu" in names else [*names, "cpu"]) if names else None
    before = jax.config.jax_platforms  # type: ignore[attr-defined]
    jax.config.update("jax_platforms", wanted)
    if before == "cpu":  # an earlier run of this process was on the CPU, and jax started no more
        clear_backends()


def changes_threads(variables: Mapping[str, str]) -> bool:
    """Whether these variables change the number of threads that XLA computes with on CPUs."""
    return _THREADS in variables


def _virtual_devices(count: int, least: int) -> None:
    """Make at least this many CPU devices; an earlier run in this process may have made fewer."""
    try:
        jax.config.update("jax_num_cpu_devices", max(count, least))
    except RuntimeError:  # jax has begun to compute
        trained_on_gpus = jax.default_backend() != "cpu"  # in an earlier run of this process
        if trained_on_gpus or len(jax.local_devices(backend="cpu")) < count:
            clear_backends()
            jax.config.update("jax_num_cpu_devices", count)


def devices_of(plan: Plan) -> list[jax.Device]:
    """jax's devices of all processes, in the plan's order. RunError: jax does not see them."""
    platform = "cpu" if plan.layout.devices[0].kind == "cpu" else "gpu"
    try:
        visible = jax.devices(platform)
    except RuntimeError:
        visible = []
    devices = []
    for process in range(plan.layout.world_size):
        of_process = [device for device in visible if device.process_index == process]
        devices += _devices_of_process(plan, process, of_process)
    return devices


def _devices_of_process(
    plan: Plan, process: int, visible: Sequence[jax.Device]
) -> list[jax.Device]:
    wanted = [plan.layout.devices[place] for place in plan.layout.devices_of(process)]
    ordered = sorted(visible, key=lambda device: device.id)
    cpu = wanted[0].kind == "cpu"
    if cpu:
        by_index = dict(enumerate(ordered))
        indices = list(range(len(wanted)))
    else:
        by_index = {device.local_hardware_id: device for device in ordered}
        indices = [device.index for device in wanted]
    missing = [str(index) for index in indices if index not in by_index]
    if not missing:
        return [by_index[index] for index in indices]
    if cpu:
        kind, remedy = "CPU device", "as many CPU devices for each process"
    else:
        kind = "GPU"
        remedy = (
            f"{pip_command('install', 'jax[cuda13]')} (or cuda12, as the driver has it); python -c"
            " 'import jax; print(jax.devices())' shows what jax sees"
        )
    raise RunError(
        f"process {process}: jax has no {kind} {', '.join(missing)};"
        f" it sees {', '.join(map(str, visible)) or 'none'}",
        remedy,
        "devices.use",
    )


def join(address: str, plan: Plan, index: int) -> None:
    """Join the other processes. RunError: they did not come."""
    gpus = None
    if plan.layout.devices[0].kind != "cpu":
        gpus = [plan.layout.devices[place].index for place in plan.layout.devices_of(index)]
    try:
        jax.distributed.initialize(
            address,
            num_processes=plan.layout.world_size,
            process_id=index,
            local_device_ids=gpus,
            initialization_timeout=_JOIN_SECONDS,
        )
    except RuntimeError as error:
        remedy = (
            "the same command on each host, and a port that the first one's firewall lets through"
        )
        raise RunError(
            f"process {index} of {plan.layout.world_size} did not meet the others at {address}:"
            f" {error}",
            remedy,
            "--rdzv",
            again=True,
        ) from None


def leave() -> None:
    """Wait for the other processes, then leave: one of them serves the rendezvous to all."""
    jax.distributed.shutdown()
