"""The expression of a user's code that raised an error, and the values of the names in it.

Nothing of the user's is called: attributes are read where they are stored.
"""

import ast
import linecache
from contextlib import suppress
from itertools import islice
from types import FrameType, TracebackType

_OF_MODULES = ("_parameters", "_buffers", "_modules")  # where a module of torch stores attributes


def expression_of(at: TracebackType) -> ast.expr | None:
    """The expression that raised the error; None: its source is not known."""
    code = at.tb_frame.f_code
    first, last, begin, end = next(islice(code.co_positions(), at.tb_lasti // 2, None))
    if first is None or last is None or begin is None or end is None:
        return None
    lines = [
        linecache.getline(code.co_filename, number, at.tb_frame.f_globals).encode()
        for number in range(first, last + 1)
    ]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    with suppress(SyntaxError, ValueError):
        return ast.parse(f"({b''.join(lines).decode()})", mode="eval").body
    return None


def value_of(expression: ast.expr, frame: FrameType) -> object:
    """The value of `name` or `name.attribute...` in a frame; None: of anything else."""
    if isinstance(expression, ast.Name):
        return frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
    if isinstance(expression, ast.Attribute):
        stored = getattr(value_of(expression.value, frame), "__dict__", {})
        places = [stored, *(stored.get(place) or {} for place in _OF_MODULES)]
        return next((one[expression.attr] for one in places if expression.attr in one), None)
    return None
