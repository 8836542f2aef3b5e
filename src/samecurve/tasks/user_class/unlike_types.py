"""The remedy where numbers of two floating-point types meet: float32 in a run of float64."""

import ast
import re
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

from samecurve.errors import message_of
from samecurve.tasks.user_class.failed_expression import expression_of, value_of

_FLOAT = "(?:Double|Float|Half|BFloat16)"
_UNLIKE_TYPES = re.compile(  # torch's words
    r"must have the same dtype|to have the same dtype|to have same dtype|and bias type \("
    rf"|and weight type \(|dtypes match, got|expected scalar type {_FLOAT} but found {_FLOAT}"
)
_MODEL = "what model() returns takes the run's type by itself"


def remedy_of_types(error: BaseException, at: TracebackType | None) -> str:
    """The remedy for an operation on tensors of unlike types, with their names; '': no such error.

    at: the innermost place in the user's code; None: it is not known
    """
    if not isinstance(error, RuntimeError) or not _UNLIKE_TYPES.search(message_of(error)):
        return ""
    types = _types_of_names(at) if at else {}
    of_run = _type_of_run(at.tb_frame) if at else ""
    unlike = [name for name, found in types.items() if found != of_run]
    alike = [name for name, found in types.items() if found == of_run]
    if not unlike or not alike:
        return (
            "cast the input to the weights' type: x.to(next(model.parameters()).dtype); what the"
            f" task keeps or makes is cast to the batch's, .to(x.dtype); {_MODEL}"
        )
    assert at is not None
    name, other = unlike[0], alike[0]
    dtype = f"{other}.dtype"
    if not isinstance(value_of(ast.parse(other, mode="eval").body, at.tb_frame), torch.Tensor):
        dtype = f"next({other}.parameters()).dtype"
    by_verify = " (as samecurve verify does)" if of_run == "float64" else ""
    return (
        f"{name} is {types[name]}, and the run computes in {of_run}{by_verify}:"
        f" {name}.to({dtype}); {_MODEL}"
    )


def _type_of_run(frame: FrameType | None) -> str:
    """The floating-point type of the model with which the user's code was called; '': unknown."""
    while frame is not None:
        model = frame.f_locals.get("model")
        if isinstance(model, torch.nn.Module):
            return next(iter(_types_of(next(model.parameters(), None))), "")
        frame = frame.f_back
    return ""


def _types_of_names(at: TracebackType) -> dict[str, str]:
    """The floating-point types of the tensors and modules that the failed expression names."""
    expression = expression_of(at)
    types = {}
    for chain in _chains(expression) if expression else ():
        known: ast.expr = chain
        dtypes = _types_of(value_of(known, at.tb_frame))
        while not dtypes and isinstance(known, ast.Attribute):  # a method of a tensor
            known = known.value
            dtypes = _types_of(value_of(known, at.tb_frame))
        if len(dtypes) == 1:
            types[ast.unparse(known)] = dtypes.pop()
    return types


def _chains(node: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    """The names, each with the attributes that follow it."""
    base = node
    while isinstance(base, ast.Attribute):
        base = base.value
    if isinstance(base, ast.Name) and isinstance(node, ast.Name | ast.Attribute):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _chains(child)


def _types_of(value: Any) -> set[str]:
    """The floating-point types of a tensor, or of what a module holds."""
    tensors: list[torch.Tensor] = []
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    elif isinstance(value, torch.Tensor):
        tensors = [value]
    return {str(one.dtype).removeprefix("torch.") for one in tensors if one.is_floating_point()}
