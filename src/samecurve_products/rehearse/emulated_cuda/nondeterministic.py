"""The operations that raise under torch.use_deterministic_algorithms on a GPU: samecurve's list.

native/deterministic.cpp holds each call on an emulated GPU against these rows.
"""

from samecurve.core.nondeterministic import OPERATIONS, Operation

Row = tuple[str, str, str, str, str, list[str]]


def rows() -> list[Row]:
    """The list as native/deterministic.h takes it."""
    made: dict[str, Row] = {}
    for operation in OPERATIONS:
        name = operation.raises.removesuffix("_")
        called, _, overload = operation.called.partition(".")
        argument, values = operation.only or ("", ())
        words = _text(operation)
        if name in made:  # such as put_, which the backward pass of take calls too
            words = f"{made[name][3]}; or {words}"
        overload = overload if called == name else ""
        made[name] = (name, overload, operation.alert, words, argument, list(values))
    return [*made.values()]


def _text(operation: Operation) -> str:
    text = f"{operation.words} has no deterministic kernel on GPUs"
    return f"{text}; in its place: {operation.instead}" if operation.instead else text
