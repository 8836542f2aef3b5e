"""The remedy for an error that a user's own code has raised: the line to write, where one helps.

A remedy looks at the error, at the expression that raised it, and at the values of the names in it.
Nothing of the user's is called for that.
"""

import ast
import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dis import get_instructions
from pathlib import Path
from types import ModuleType, TracebackType

from samecurve.core.config.document import suggest
from samecurve.core.system import explain_os_error
from samecurve.errors import message_of
from samecurve.tasks.user_class.failed_expression import expression_of, value_of

_MOST_KEYS = 12  # that are named
_NO_GPU = re.compile(
    r"not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs|No HIP GPUs|invalid device ordinal"
    r"|Cannot access accelerator device"
)
_DEVICES_DIFFER = re.compile(r"Expected all tensors to be on the same device|is on the meta device")
_LABEL = re.compile(r"Target (-?\d+) is out of bounds|Assertion .*cur_target")
_TYPE_OF_LABELS = re.compile(
    r"expected (?:scalar type|target dtype to be) Long|nll_loss.* not implemented for"
)
_SHAPES = re.compile(r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)")


def remedy_for(error: BaseException, file: str, at: TracebackType | None) -> str:
    """The most likely remedy.

    file: the user's file, as one would name it
    at: the innermost place in the user's code; None: it is not known
    """
    if isinstance(error, ModuleNotFoundError):
        if error.name == "lockstep":
            return "that program is called Samecurve now: from samecurve import Mean"
        return (
            f"install {error.name}, put it beside {Path(file).name}, or name its directory in"
            " PYTHONPATH"
        )
    for remedy_of in _REMEDIES:
        if remedy := remedy_of(error, at):
            return remedy
    return "this line of your code raises the error: correct it there"


def _of_the_message(error: BaseException, _at: object) -> str:
    """A remedy that torch's own words call for; '': none."""
    message = message_of(error)
    if "Default process group has not been initialized" in message:
        return (
            "leave the call out: a task's code sees one device, and gradients, losses and metrics"
            " are summed over all devices after it; or ask torch.distributed.is_initialized()"
            " first, which says False here"
        )
    if _NO_GPU.search(message):
        return (
            "take .cuda() or .to(...) out of this line: model and batch are on the run's device"
            " already; for what you make yourself write device=x.device"
        )
    if _DEVICES_DIFFER.search(message):
        return (
            "make the tensor on the batch's device: device=x.device; what the model keeps is a"
            " parameter or a buffer (register_buffer), which moves with it"
        )
    if label := _LABEL.search(message):
        which = f"label {label[1]}" if label[1] else "a label"
        return (
            f"{which} has no class: labels count from 0, and the model's last layer must have a row"
            " for each; ignore_index=-100 leaves a label out"
        )
    if message == "index out of range in self":
        return (
            "an index has no row in the embedding: num_embeddings must be larger than the largest"
            " index in the data (a token beyond the vocabulary?)"
        )
    if _TYPE_OF_LABELS.search(message):
        return "labels are whole numbers of 64 bits: batch[NAME].long(), or np.int64 in the data"
    if shapes := _SHAPES.search(message):
        return (
            f"the input has {shapes[2]} features in its last dimension, and the layer takes"
            f" {shapes[3]}: change the layer, or the shape of its input"
        )
    return ""


def _of_types(error: BaseException, at: TracebackType | None) -> str:
    """The remedy where floating-point types meet in a call of torch; '': the error is another."""
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return ""
    from samecurve.tasks.user_class.unlike_types import remedy_of_types

    return remedy_of_types(error, at)


def _of_a_file(error: BaseException, _at: object) -> str:
    """The remedy for a file that can't be read; '': the error is another one."""
    if isinstance(error, UnicodeDecodeError):
        return (
            f"the file is not {error.encoding}: open(path, encoding=...) with the encoding that it"
            " has, or iconv -f latin1 -t utf-8 OLD > NEW"
        )
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return ""
    if isinstance(error, FileNotFoundError):
        return (
            f"a relative path begins where samecurve is started, here {Path.cwd()}: start it"
            " elsewhere, or make the path from __file__"
        )
    return explain_os_error(error, Path(error.filename), "run the same command again")[1]


def _of_an_attribute(error: BaseException, at: TracebackType | None) -> str:
    """The remedy for an attribute that is not there; '': none."""
    if not isinstance(error, AttributeError):
        return ""
    if "before Module.__init__() call" in message_of(error):
        return "super().__init__() as the first line of the module's own __init__"
    if _of_another_phase(error):
        return (
            "nothing passes from one phase to the next: compute it in each phase, in those that"
            " don't train it under torch.no_grad() or with .detach(); noise that both want alike is"
            " a column of the data"
        )
    if isinstance(error.obj, dict):
        if error.name in {"to", "cuda", "cpu"}:
            return f"leave .{error.name}() out: its tensors are on the run's device already"
        if error.name in error.obj:
            return f'it is a mapping: write ["{error.name}"] for .{error.name}'
        return f"it is a mapping{_keys(error.obj, error.name)}"
    if isinstance(error.obj, str) and (remedy := _of_unpacked(at)):
        return remedy
    if _forgot_init(error):
        return (
            f"def __init__(self, model, data): self.{error.name} = ...: it is given the config's"
            " model and data sections"
        )
    return ""


def _of_a_key(error: BaseException, at: TracebackType | None) -> str:
    """The remedy for a key that is not there, with the keys that are; '': none."""
    if not isinstance(error, KeyError) or not error.args or at is None:
        return ""
    expression, key = expression_of(at), error.args[0]
    if not isinstance(expression, ast.Subscript):
        return ""
    mapping = value_of(expression.value, at.tb_frame)
    if not isinstance(mapping, dict) or key in mapping:
        return ""
    name = ast.unparse(expression.value)
    if str(key) in mapping:
        return f'the keys of {name} are texts: {name}["{key}"]'
    return f"{name} is a mapping{_keys(mapping, key)}"


def _of_a_mapping_unpacked(error: BaseException, at: TracebackType | None) -> str:
    """The remedy for `x, y = batch`, at once or where the names are used as tensors; '': none."""
    if at is None:
        return ""
    if isinstance(error, ValueError) and "values to unpack" in message_of(error):
        frame = at.tb_frame
        line = linecache.getline(frame.f_code.co_filename, at.tb_lineno, frame.f_globals)
        with suppress(SyntaxError):
            (statement,) = ast.parse(line.strip()).body
            if isinstance(statement, ast.Assign):
                mapping = value_of(statement.value, frame)
                if isinstance(mapping, dict):
                    return _take_by_name(ast.unparse(statement.value), mapping)
    if isinstance(error, TypeError) and "str" in message_of(error):
        return _of_unpacked(at)
    if isinstance(error, TypeError) and "must be Tensor, not dict" in message_of(error):
        for name, value in at.tb_frame.f_locals.items():
            if isinstance(value, dict) and value:
                one = f'{name}["{next(iter(value))}"]'
                return f"{name} is a mapping{_keys(value)}: give one of them, {one}"
    return ""


def _of_unpacked(at: TracebackType | None) -> str:
    """The remedy where local names hold keys of a mapping beside them; '': they don't."""
    values = at.tb_frame.f_locals if at else {}
    for name, mapping in values.items():
        if not isinstance(mapping, dict):
            continue
        held = [other for other, value in values.items() if isinstance(value, str)]
        if any(values[other] in mapping for other in held):
            return _take_by_name(name, mapping)
    return ""


def _take_by_name(name: str, mapping: Mapping[object, object]) -> str:
    keys = list(mapping)[:2]
    taken = ", ".join(f'{name}["{key}"]' for key in keys)
    return (
        f"{name} is a mapping{_keys(mapping)}, and to unpack it gives its keys: take its values by"
        f" name, {taken}"
    )


def _keys(mapping: Mapping[object, object], wanted: object = "") -> str:
    """The keys of a mapping in words, and which of them may have been meant."""
    keys = list(map(str, mapping))
    if not keys:
        return " without keys"
    shown = ", ".join(f'"{key}"' for key in keys[:_MOST_KEYS])
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    meant = suggest(str(wanted), keys) if wanted else ""
    return f" with the keys {shown}{more}" + (f"; {meant}" if meant else "")


def _of_another_phase(error: AttributeError) -> bool:
    """Whether the missing attribute is one that the task's methods set, in another phase."""
    kind = type(error.obj)
    if not getattr(kind, "phases", None) or isinstance(error.obj, type):
        return False
    methods = [method for base in kind.__mro__ for method in vars(base).values()]
    codes = [getattr(method, "__code__", None) for method in methods]
    return any(
        step.opname == "STORE_ATTR" and step.argval == error.name
        for code in codes
        if code is not None
        for step in get_instructions(code)
    )


def _forgot_init(error: AttributeError) -> bool:
    """Whether the missing attribute belongs to a class of the user's that has no __init__."""
    kind = type(error.obj)
    return (
        error.obj is not None
        and kind.__init__ is object.__init__
        and not isinstance(error.obj, type | ModuleType)
    )


_REMEDIES: Sequence[Callable[[BaseException, TracebackType | None], str]] = (
    _of_a_key,
    _of_a_mapping_unpacked,
    _of_an_attribute,
    _of_a_file,
    _of_types,
    _of_the_message,
)
