"""The steps that make a task's model ready to be laid out on devices: number format, blocks, and
real values for parameters that were made on the meta device.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from samecurve.core.config import Precision
from samecurve.core.config.param_groups import ParamRules
from samecurve.core.planning.plan import Plan
from samecurve.errors import UserError
from samecurve.torch_engine.precision import weight_dtype

Initialize = Callable[[str, torch.Tensor], None]  # fills a parameter, by its name in the model
InitializeModule = Callable[[str, nn.Module], None]  # fills a module's own parameters and buffers
IsGiven = Callable[[str], bool]  # whether a parameter, by its name, gets its values elsewhere

# The operations whose results are kept where blocks run again in part ("selective"): those that
# cost most to run again; of the products, every second one is kept
_KEPT_OPERATIONS = {
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 - aten's name
    torch.ops.aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001 - aten's name
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001 - aten's name
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001 - too
}
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,  # noqa: SLF001 - aten's name
}
_BLOCK = "samecurve_block"  # attribute of a module that the task has named as a block
_ROUNDED_LAYERS = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d}


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread of the CPU within the block.

    Sums over several threads are rounded in another way: a device that has the machine to itself
    would give other last digits than one of several.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's own generators while the block runs; afterwards they are as they were.

    These are the host's and, where CUDA runs, the current GPU's. Other GPUs are left alone: a
    context on a GPU takes memory.
    """
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = [torch.cuda.current_device()] if started else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        yield


def cast_weights(model: nn.Module, precision: Precision) -> nn.Module:
    """Convert floating values to the precision's weight format, and complex values to pairs of that
    format (Module.to() would drop imaginary parts).
    """
    real = weight_dtype(precision)
    pair = torch.complex128 if real == torch.float64 else torch.complex64

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(pair)
        return tensor.to(real) if tensor.is_floating_point() else tensor

    return model._apply(cast)  # type: ignore[no-untyped-call, no-any-return]  # noqa: SLF001


def freeze(model: nn.Module, rules: ParamRules) -> None:
    """Freeze the parameters that a group of the config freezes. What the model has frozen stays so.

    UserError: a group matches no parameter.
    """
    rules.check_names(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if rules.is_frozen(name):
            parameter.requires_grad_(False)


def name_blocks(blocks: Iterable[nn.Module]) -> None:
    """Mark modules as the blocks of the model that they lie in. Copies of the model keep it."""
    for block in blocks:
        setattr(block, _BLOCK, True)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: those that its task has named.

    Without any: the elements of its outermost ModuleLists and Sequentials that have at least two
    parts with parameters. An element that is only a container stands for what it holds.
    """
    named = [module for module in model.modules() if module is not model and _BLOCK in vars(module)]
    return named or _found_blocks(model)


def _found_blocks(model: nn.Module) -> list[nn.Module]:
    parts = _parts(model)
    if isinstance(model, nn.ModuleList | nn.Sequential) and len(parts) > 1:
        return [called for part in parts for called in _called_parts(part)]
    return [block for child in model.children() for block in _found_blocks(child)]


def _parts(model: nn.Module) -> list[nn.Module]:
    """The children of a module that have parameters."""
    return [part for part in model.children() if any(True for _ in part.parameters())]


def _called_parts(part: nn.Module) -> list[nn.Module]:
    """The part itself, or, where it can't be called (a container), the callable parts inside it."""
    if type(part).forward is not nn.Module.forward:
        return [part]
    return [called for child in _parts(part) for called in _called_parts(child)]


def run_uncompiled(plan: Plan) -> AbstractContextManager[object]:
    """Let a compiled model run uncompiled meanwhile: for inputs of a new length each time."""
    return torch.compiler.set_stance("force_eager") if plan.compiles_blocks else nullcontext()


class KeptProducts:
    """Chooses the results that are kept of one call of a block that runs again in part: attention,
    convolutions, and the first, third, fifth ... product with weights.
    """

    def __init__(self) -> None:
        # products seen so far in the forward pass (False), and when the block runs again (True)
        self._products = {False: 0, True: 0}

    def is_kept(self, operation: object, *, is_recompute: bool) -> bool:
        if operation not in _PRODUCTS:
            return operation in _KEPT_OPERATIONS
        self._products[is_recompute] += 1
        return self._products[is_recompute] % 2 == 1

    def policy(
        self, context: Any, operation: object, *_arguments: object, **_keywords: object
    ) -> CheckpointPolicy:
        if self.is_kept(operation, is_recompute=context.is_recompute):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def autocast_rounded(part: nn.Module, among: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules whose weights autocast rounds before every use, and that no other module uses.

    among: modules inside `part`, of which those are returned
    """
    uses = Counter(
        id(parameter) for module in part.modules() for parameter in module.parameters(recurse=False)
    )
    return [
        module
        for module in among
        if type(module) in _ROUNDED_LAYERS
        and module is not part
        and all(uses[id(parameter)] == 1 for parameter in module.parameters(recurse=False))
    ]


def sharding_facts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The facts about sharding a model: block_arrays and rounded. It may be on the meta device."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks = repeated_blocks(model)
    in_blocks = [module for block in blocks for module in block.modules()]
    ids = {id(module) for module in in_blocks}
    outside = [module for module in model.modules() if id(module) not in ids]
    rounded = [module for block in blocks for module in autocast_rounded(block, block.modules())]

    def names_of(modules: Iterable[nn.Module]) -> tuple[str, ...]:
        parameters = (p for module in modules for p in module.parameters(recurse=False))
        return tuple(dict.fromkeys(names[id(parameter)] for parameter in parameters))

    return {
        "block_arrays": names_of(in_blocks),
        "rounded": names_of([*rounded, *autocast_rounded(model, outside)]),
    }


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters that are registered meanwhile on the meta device. Buffers stay real."""
    module_class: Any = nn.Module
    register = module_class.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    module_class.register_parameter = register_on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register


def unsaved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a module, and of the modules within it, that no checkpoint keeps, by name."""
    found = {}
    for place, part in module.named_modules():
        for name in part._non_persistent_buffers_set:  # noqa: SLF001 - torch has no other way
            buffer = part._buffers[name]  # noqa: SLF001 - too
            if buffer is not None and not buffer.is_meta:
                found[f"{place}.{name}".removeprefix(".")] = buffer
    return found


@contextmanager
def unsaved_buffers_kept(module: nn.Module) -> Iterator[None]:
    """Leave the buffers that no checkpoint keeps as model() has made them.

    A library's rule for first values may set them anew, and a resume, which follows no such rule,
    would go on with other values.
    """
    before = {name: buffer.clone() for name, buffer in unsaved_buffers(module).items()}
    yield
    for name, buffer in unsaved_buffers(module).items():
        if name in before:
            buffer.copy_(before[name])


class Materializer:
    """Makes a model's meta parameters real, part by part, so that a model larger than the device
    can be sharded as it comes to be. Shared parameters stay shared.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        initialize: Initialize | None = None,
        initialize_module: InitializeModule | None = None,
        is_given: IsGiven | None = None,
        *,
        on_host: Collection[str] = (),
    ) -> None:
        """Prepare for a model whose parameters are on the meta device.

        initialize: fills one parameter; None: parameters stay empty
        initialize_module: takes its place: fills a module's parameters, on a CPU, children before
            parents
        is_given: parameters that stay empty, and modules of which all do; None: none
        on_host: names of parameters that lie in host memory, whatever the device
        """
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._module_names = {id(module): name for name, module in model.named_modules()}
        uses = Counter(
            id(parameter)
            for module in model.modules()
            for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        )
        self._shared_ids = {key for key, count in uses.items() if count > 1}
        self._device, self._initialize = device, initialize
        self._initialize_module = initialize_module
        self._is_given: IsGiven = is_given or (lambda _name: False)
        self._on_host = on_host
        self._dtypes: dict[int, torch.dtype] = {}  # of real parameters, once they have values
        self._devices: dict[int, torch.device] = {}  # of real parameters
        # the real parameters that several modules share; the others are not held here, so that
        # they are freed as soon as a strategy has taken its part of them
        self._shared: dict[int, nn.Parameter] = {}
        self._unset: set[int] = set()  # ids of real parameters whose module has yet to fill them

    @torch.no_grad()
    def __call__(self, part: nn.Module) -> None:
        modules = [module for module in part.modules() if self._make_real(module)]
        if self._initialize_module is None:
            return
        for module in reversed(modules):  # modules() gives parents first
            name = self._module_names[id(module)]
            own = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
            if not all(self._is_given(key.removeprefix(".")) for key in own):
                before = {key: value.clone() for key, value in unsaved_buffers(module).items()}
                self._initialize_module(name, module)
                _check_unsaved_buffers(name, module, before)
        self._check_values(modules)
        for module in modules:
            for parameter in module.parameters(recurse=False):
                dtype = self._dtypes.get(id(parameter), parameter.dtype)
                device = self._devices.get(id(parameter), self._device)
                parameter.data = parameter.data.to(device, dtype)

    def _check_values(self, modules: Iterable[nn.Module]) -> None:
        """UserError: a rule for modules has left a parameter as it was made, without values."""
        for module in modules:
            for key, parameter in module.named_parameters(recurse=False):
                name = f"{self._module_names[id(module)]}.{key}".removeprefix(".")
                is_due = id(parameter) in self._unset and not self._is_given(name)
                self._unset.discard(id(parameter))
                if is_due and parameter.isnan().any():
                    raise UserError(
                        f"the task's init_module() gives {name} of {type(module).__name__} no first"
                        " values",
                        "fill every parameter of such a module there",
                    )

    def _make_real(self, module: nn.Module) -> bool:
        """Make a module's own parameters real. Returns whether any of them was on meta."""
        named = list(module.named_parameters(recurse=False, remove_duplicate=False))
        empty = [
            (attribute, parameter)
            for attribute, parameter in named
            if id(parameter) in self._names and parameter.is_meta
        ]
        for attribute, parameter in empty:
            module.register_parameter(attribute, self._real(parameter))
        return bool(empty)

    def _real(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) in self._shared:
            return self._shared[id(parameter)]
        name = self._names[id(parameter)]
        place = torch.device("cpu") if name in self._on_host else self._device
        device, dtype = place, parameter.dtype
        if self._initialize_module is not None:  # drawn in float32, and only widened from there
            device = torch.device("cpu")
            dtype = torch.float32 if dtype == torch.float64 else dtype
        if parameter.is_contiguous():  # empty_like() of a meta tensor imports sympy: 0.5 s
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
        else:
            values = torch.empty_like(parameter, dtype=dtype, device=device)
        real = nn.Parameter(values, parameter.requires_grad)
        if self._initialize_module is not None and dtype.is_floating_point:
            values.fill_(torch.nan)  # what a rule leaves out is seen
            self._unset.add(id(real))
        self._dtypes[id(real)], self._devices[id(real)] = parameter.dtype, place
        if self._initialize is not None and not self._is_given(name):
            self._initialize(name, real)
        if id(parameter) in self._shared_ids:
            self._shared[id(parameter)] = real
        return real


def _check_unsaved_buffers(
    name: str, module: nn.Module, before: Mapping[str, torch.Tensor]
) -> None:
    """UserError: a rule for first values has changed a buffer that no checkpoint keeps.

    name: the module's in its model; before: the buffers before the rule
    """
    for key, buffer in unsaved_buffers(module).items():
        if key not in before:
            continue
        changed = (buffer != before[key]) & (buffer == buffer)  # noqa: PLR0124 - a nan is none
        if changed.any():
            raise UserError(
                f"the task's init_module() changes the buffer {f'{name}.{key}'.removeprefix('.')},"
                " which no checkpoint keeps: a resumed run would go on with another value",
                "set it where the module is made, or register it with persistent=True",
                "task",
            )
