"""Functions of the user's code: where they begin, what they read."""

from types import CodeType

from samecurve.torch_engine.split_check.call_sites import kind_of, shown_path


def place_of_method(task: object, method: str) -> str:
    """file:line of a method of a task."""
    code = _code(task, method)
    return place_of(code) if code else "task"


def names_read(task: object, method: str) -> set[str]:
    """Names of attributes and variables in a method of a task, functions within it too."""
    names, waiting = set(), [_code(task, method)]
    while waiting:
        code = waiting.pop()
        if code is not None:
            names |= {*code.co_names, *code.co_freevars}
            waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


def _code(task: object, method: str) -> CodeType | None:
    function = getattr(getattr(task, "task", task), method, None)
    code: CodeType | None = getattr(getattr(function, "__func__", function), "__code__", None)
    return code


def place_of(code: CodeType) -> str:
    """file:line where a function begins."""
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno}"


def is_users(filename: str) -> bool:
    return kind_of(filename) == "users"
