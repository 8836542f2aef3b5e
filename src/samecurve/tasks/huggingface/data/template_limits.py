"""A chat template that is compiled so that it counts its work while it renders.

A template comes with a model and may be hostile. Whatever can take much memory or time is counted
before it happens: the turns of loops, the calls of macros, operators, filters, methods of text,
comparisons and output. What cannot be counted is refused: filters that make HTML, and methods of
text that no chat template needs. The library's own environment renders, and the text of any other
template is the library's.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from typing import Any, cast

from jinja2 import Template, nodes, pass_context
from jinja2.ext import Extension
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import SandboxedFormatter
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from samecurve.tasks.huggingface.data.template_meter import NODE, Meter, TemplateLimitError

_LONGEST = 1 << 18  # characters of a template
_WIDEST = 1 << 14  # bits of a whole number
_CALL = 256  # cells of a call of a macro, beside its body
_DIGITS = re.compile(r"\d+")

# filters that cost nothing, or whose cost arises where their result is used
_FREE = {
    *("abs", "attr", "count", "d", "default", "first", "items", "last", "length", "map", "reject"),
    *("rejectattr", "select", "selectattr"),
}
_LISTING = {  # filters that take all of an iterator at once
    *("batch", "groupby", "join", "list", "max", "min", "slice", "sort", "sum", "unique"),
}
_REFUSED = ("filesizeformat", "pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_COMPARING = {  # tests
    *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le"),
    *("lessthan", "lt", "ne"),
}
_METHODS = {  # methods of text: the cells that each takes for a character
    **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), 2),
    **dict.fromkeys(("count", "find", "index", "rfind", "rindex", "startswith", "endswith"), 1),
    **dict.fromkeys(("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"), 1),
    **dict.fromkeys(("partition", "rpartition"), 2),
    **dict.fromkeys(("split", "rsplit", "splitlines"), NODE),
    **dict.fromkeys(("encode", "decode", "hex", "escape", "unescape"), 4),
    **dict.fromkeys(("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier"), 1),
    **dict.fromkeys(("islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"), 1),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), 1),
}


class LimitedTemplate:
    """A template of this text. It renders in the place of a template that the library has made.

    place: the library's template; no other template uses its environment
    """

    def __init__(self, text: str, place: Any) -> None:
        self.place = place
        self._meter = Meter()
        if len(text) > _LONGEST:
            raise TemplateLimitError(f"the chat template has {len(text)} characters")
        tree = place.environment.parse(text)
        self._whole = _cost(tree.body)
        _Hooks(self._meter, place.environment, _longest_body(tree)).install()
        with self._meter.limited():
            limited: Template = place.environment.from_string(_Counting().visit(tree))
        place.root_render_func, place.blocks = limited.root_render_func, limited.blocks

    def counted(self, *inputs: Any) -> AbstractContextManager[None]:
        """Count what the template does within the block. inputs: what the template is given."""
        return self._meter.limited(*inputs, work=self._whole)


def _cost(body: Iterable[nodes.Node]) -> int:
    """The cells of doing these statements once, their own text included."""
    cells = 0
    for statement in body:
        for node in (statement, *statement.find_all(nodes.Node)):
            cells += len(node.data) if isinstance(node, nodes.TemplateData) else 2
    return cells


def _longest_body(tree: nodes.Template) -> int:
    """The cells of the costliest body that a call can run."""
    kinds = (nodes.Macro, nodes.CallBlock, nodes.Block, nodes.For)
    return max((_cost([node]) for node in tree.find_all(kinds)), default=0)


class _Counting(NodeTransformer):
    """Puts the filters of `_Hooks` around what costs by its size."""

    def get_visitor(self, node: nodes.Node) -> Callable[..., Any] | None:
        """The method for a kind of node, `_for` and others."""
        method: Callable[..., Any] | None = getattr(self, f"_{type(node).__name__.lower()}", None)
        return method

    def _for(self, node: nodes.For) -> nodes.Node:
        cost = NODE + _cost([node.target, *node.body]) + (_cost([node.test]) if node.test else 0)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted turns", nodes.Const(cost))
        return node

    def _output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_read(each) for each in node.nodes]
        return node

    def _concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_read(each) for each in node.nodes]
        return node

    def _compare(self, node: nodes.Compare) -> nodes.Node:
        """Equality with a constant takes no more than the constant."""
        constant = any(isinstance(each, nodes.Const) for each in (node.expr, node.ops[0].expr))
        simple = len(node.ops) == 1 and constant and node.ops[0].op not in ("in", "notin")
        self.generic_visit(node)
        if not simple:
            node.expr = _read(node.expr)
            for operand in node.ops:
                operand.expr = _read(operand.expr)
        return node

    def _getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, "counted copy")
        node.arg = _read(node.arg)
        return node

    def _pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _read(node.key)
        return node


def _read(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.Const | nodes.TemplateData):
        return node
    return _filtered(node, "counted read")


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    expression = cast("nodes.Expr", node)
    filtered = nodes.Filter(expression, name, list(args), [], None, None)  # it takes no keywords
    filtered.set_lineno(node.lineno)
    return filtered


class _Hooks:
    """The operations of the environment, each counted before it is done."""

    def __init__(self, meter: Meter, environment: Any, longest_body: int) -> None:
        self._meter, self._environment = meter, environment
        self._body = _CALL + longest_body
        self._call, self._binary = environment.call, environment.call_binop
        self._format = environment.wrap_str_format

    def install(self) -> None:
        environment, meter = self._environment, self._meter
        environment.intercepted_binops = frozenset({"+", "*", "**", "%"})
        environment.call_binop, environment.call = self._call_operator, self._call_function
        environment.wrap_str_format = self._wrap_format
        environment.globals.pop("lipsum", None)
        filters = {
            name: self._filter(name, function)
            for name, function in environment.filters.items()
            if name not in _REFUSED
        }
        environment.filters = {
            **filters,
            "counted read": _counted_read(meter),
            "counted copy": pass_context(lambda _context, value: self._copied(value)),
            "counted turns": pass_context(lambda _context, value, cost: self._turns(value, cost)),
        }
        environment.tests = {
            name: self._test(function) if name in _COMPARING else function
            for name, function in environment.tests.items()
        }

    def _turns(self, value: Any, cost: int) -> Any:
        """The values of a loop, counted. cost: the cells of a turn."""
        if isinstance(value, Sized):
            self._meter.spend(len(value) * cost)
            return value
        return self._each_turn(value, cost)

    def _each_turn(self, value: Iterable[Any], cost: int) -> Iterator[Any]:
        for each in value:
            self._meter.spend(cost)
            yield each

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Sized):
            self._meter.spend(len(value) * (1 if isinstance(value, str) else NODE))
        return value

    def _call_operator(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if type(left) is str and type(right) is str:
                self._meter.spend(len(left) + len(right))
                return left + right
            if isinstance(left, Sized) and isinstance(right, Sized):
                count = len(left) + len(right)
                self._meter.spend(count if isinstance(left, str) else NODE * count)
        elif operator == "%" and isinstance(left, str | bytes):
            self._percent(left, right)
        elif isinstance(left, Sized) or isinstance(right, Sized):
            several, times = (left, right) if isinstance(left, Sized) else (right, left)
            if isinstance(times, int):
                size = 1 if isinstance(several, str) else NODE
                self._meter.spend(len(several) * max(times, 0) * size)
        elif isinstance(left, int) and isinstance(right, int) and operator != "%":
            bits = left.bit_length()
            if (bits * right if operator == "**" else bits + right.bit_length()) > _WIDEST:
                raise TemplateLimitError("the chat template makes a number that is too large")
        return self._binary(context, operator, left, right)

    def _percent(self, form: Any, values: Any) -> None:
        """Count what `form % values` makes: widths, and each value wherever it may be put."""
        text = form if isinstance(form, str) else form.decode("latin-1")
        widths = sum(_number(digits) for digits in _DIGITS.findall(text))
        if "*" in text:
            widths += _numbers(values if isinstance(values, tuple) else (values,))
        self._meter.spend(widths + len(text) + text.count("%") * self._meter.weigh(values))

    def _call_function(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        meter = self._meter
        if isinstance(owner, str | bytes):
            args = self._text_method(owner, function.__name__, args, kwargs)
        elif isinstance(function, Macro | BlockReference | LoopContext):
            if isinstance(function, LoopContext) and args:
                again = args[0] if isinstance(args[0], Sized) else list(args[0])
                args = (again, *args[1:])
                meter.spend(len(again) * self._body)
            meter.spend(self._body)
        elif isinstance(owner, Extension):  # it joins all the text so far
            meter.spend(self._body + (meter.spent >> 6))
        elif owner is None:
            meter.spend(NODE * sum(meter.weigh(each) for each in (*args, *kwargs.values())))
        else:
            if getattr(function, "__name__", "") not in ("get", "items", "keys", "values", "copy"):
                meter.read(owner)
                meter.spend(_numbers(args))
            for each in args:
                meter.read(each)
        return self._call(context, function, *args, **kwargs)

    def _text_method(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Count a method of text. Returns the arguments, with all of an iterator."""
        meter = self._meter
        if name == "join" and args:
            args = (list(args[0]),)
            meter.spend(len(args[0]) * (len(owner) + NODE) + meter.weigh(args[0]))
        elif name == "replace" and len(args) >= 2:
            self._replaced(owner, args[0], args[1])
        elif name in _METHODS:
            length = len(owner) + sum(meter.weigh(each) for each in args)
            meter.spend(NODE + length * _METHODS[name] + _numbers((*args, *kwargs.values())))
        else:
            raise TemplateLimitError(f"the chat template calls {name!r} of a text: not served")
        return args

    def _replaced(self, text: Any, old: Any, new: Any) -> None:
        times = text.count(old) if isinstance(old, type(text) | str) else 0
        self._meter.spend(len(text) + times * self._meter.weigh(new))

    def _wrap_format(self, value: Any) -> Any:
        """`format` of a text, which counts what it puts in."""
        plain = self._format(value)
        if plain is None or isinstance(value.__self__, Markup):
            return plain if plain is None else _refuse_format
        formatter = _CountingFormatter(self._environment, self._meter)

        def counted(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                return formatter.vformat(value.__self__, (), args[0])
            return formatter.vformat(value.__self__, args, kwargs)

        return counted

    def _filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that counts first."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # its context, or the like
        count = getattr(self, f"_count_{name}", self._count_filter)
        meter = self._meter

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            meter.spend(NODE)
            if name not in _FREE:
                value, rest = args[first], args[first + 1 :]
                if name in _LISTING and not isinstance(value, Sized | str):
                    value = list(value)
                    meter.spend(NODE * len(value))
                    args = (*args[:first], value, *rest)
                count(value, *rest, **kwargs)
            return function(*args, **kwargs)

        return counted

    def _count_filter(self, value: Any, *args: Any, **kwargs: Any) -> None:
        others = (*args, *kwargs.values())
        cells = self._meter.weigh(value) + sum(self._meter.weigh(each) for each in others)
        self._meter.spend(4 * cells + _numbers(others))

    def _count_trim(self, value: Any, *_args: Any, **_given: Any) -> None:
        self._meter.read(value)

    def _count_list(self, value: Any) -> None:
        self._meter.spend(NODE * len(value))

    def _count_reverse(self, value: Any) -> None:
        if isinstance(value, str):
            self._meter.spend(len(value))

    def _count_join(self, value: Any, d: Any = "", _attribute: Any = None, **_given: Any) -> None:
        self._meter.spend(len(value) * self._meter.weigh(d) + 4 * self._meter.weigh(value))

    def _count_replace(self, s: Any, old: Any, new: Any, *_count: Any, **_given: Any) -> None:
        self._meter.read(s)
        self._replaced(str(s), str(old), new)

    def _count_format(self, value: Any, *args: Any, **kwargs: Any) -> None:
        self._meter.read(value)
        self._percent(str(value), kwargs or args)

    def _count_indent(self, s: Any, width: Any = 4, *_args: Any, **_given: Any) -> None:
        wide = max(width, 0) if isinstance(width, int) else self._meter.weigh(width)
        self._meter.spend(self._meter.weigh(s) + (str(s).count("\n") + 1) * wide)

    def _count_sum(self, value: Any, _attribute: Any = None, start: Any = 0, **_given: Any) -> None:
        if not isinstance(start, int | float):
            raise TemplateLimitError("the chat template adds up lists by the filter `sum`")
        self._meter.spend(4 * self._meter.weigh(value))

    def _count_tojson(self, x: Any, *args: Any, **kwargs: Any) -> None:
        cells, depth = self._meter.measure(x)
        others = (*args, *kwargs.values())
        wide = _numbers(others) * depth + sum(self._meter.weigh(each) for each in others)
        self._meter.spend(2 * cells + cells // NODE * wide)

    def _test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            for each in args:
                self._meter.read(each)
            return function(*args)

        return counted


class _CountingFormatter(SandboxedFormatter):
    """Counts each value that a text's `format` puts in, and its width."""

    def __init__(self, environment: Any, meter: Meter) -> None:
        super().__init__(environment)
        self._meter = meter

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._meter.read(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._meter.read(value)
        self._meter.spend(NODE + sum(_number(digits) for digits in _DIGITS.findall(format_spec)))
        return super().format_field(value, format_spec)


def _refuse_format(*_args: Any, **_kwargs: Any) -> str:
    raise TemplateLimitError("the chat template formats text that is marked as HTML")


def _counted_read(meter: Meter) -> Callable[..., Any]:
    @pass_context
    def read(_context: Any, value: Any) -> Any:
        if type(value) is str:
            meter.spend(len(value))
        else:
            meter.spend(meter.weigh(value))
        return value

    return read


def _number(digits: str) -> int:
    """A width in a format. One of many digits is beyond any limit."""
    return int(digits) if len(digits) < 12 else 10**12


def _numbers(values: Iterable[Any]) -> int:
    """The sum of the whole numbers: widths and counts that a call is given."""
    return sum(max(each, 0) for each in values if isinstance(each, int))
