"""The language of chat templates: Jinja as Hugging Face templates are written in it, in a sandbox and in bounds.

A template comes with a model, so it is input from outside. Jinja's sandbox keeps it from the machine. It does not bound
time or memory: `{{ 'x' * 10 ** 11 }}` or four loops in each other would take a server down. Here every loop, call,
operator and filter pays for its results out of one allowance for a rendering.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARACTERS = 1 << 18  # public templates have up to 40,000
MAX_CPU_S = 2.0  # of the rendering thread; public templates take milliseconds
BASE_CHARACTERS = 1 << 26  # that a rendering may make on its way
CHARACTERS_PER_INPUT = 100  # that it may make beyond these for each character of the messages
MAX_INTEGER = 1_000_000  # as an argument, such as a width
MAX_BITS = 1 << 14  # of a product
SCALAR_CHARACTERS, NODE_CHARACTERS = 16, 64  # about what a number takes as text, and an object in memory
MAX_WIDTH = 999  # in a format
LONG_WIDTH = re.compile(r"%(\([^%]*\))?[-+ #0]*(\d*\.)?(\d{4}|\*)|\{[^{}:]*:[^{}]*?(\d{4}|\{)")
# Methods whose result may be larger than what goes in. Those of bytes have the same names.
GROWING_METHODS = {
    "center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "to_bytes", "translate",
    "zfill",
}  # fmt: skip
# Filters that pass on what they get and make no text of it. Weighing a conversation for each would take long.
PASSING_FILTERS = {
    "attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "map", "max",
    "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum", "unique",
}  # fmt: skip


class TooMuch(TemplateError):
    """A rendering has used up its allowance."""


class Allowance:
    """The rest that one rendering may use: characters that it makes, and seconds of processor time."""

    def __init__(self, input_characters: int) -> None:
        self.characters = BASE_CHARACTERS + CHARACTERS_PER_INPUT * input_characters
        self._until_s = time.thread_time() + MAX_CPU_S

    def spend(self, characters: int) -> None:
        """Raises TooMuch where there is not so much left, before anything of that size should be made."""
        self.check(characters)
        self.characters -= characters + 1

    def check(self, characters: int) -> None:
        """Raises TooMuch as `spend`, and spends nothing."""
        if characters >= self.characters:
            raise TooMuch("it makes texts too long to be a prompt")
        if time.thread_time() > self._until_s:
            raise TooMuch(f"it runs for more than {MAX_CPU_S:g} s")


class Dialect(ImmutableSandboxedEnvironment):
    """Compiles and renders templates. Several threads may use one.

    A template is compiled and rendered inside `allowance`.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self._spending = threading.local()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._shown
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(name, work) for name, work in self.filters.items()}
        self.globals |= {
            "raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace,
        }  # fmt: skip
        del self.globals["lipsum"]  # random words, as many as it is asked for

    @contextmanager
    def allowance(self, input_characters: int = 0) -> Iterator[None]:
        """Begins to meter this thread's compilation or rendering."""
        self._spending.allowance = Allowance(input_characters)
        try:
            yield
        finally:
            del self._spending.allowance

    @property
    def _left(self) -> Allowance:
        allowance: Allowance = self._spending.allowance
        return allowance

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TooMuch(f"it has {len(source):,} characters; at most {MAX_SOURCE_CHARACTERS:,}")
        tree = super()._parse(source, name, filename)
        parsed: nodes.Template = _Metered().visit(tree)
        return parsed

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins the pieces that a template, a block or a macro writes."""
        written = list[str]()
        for piece in pieces:
            self._left.spend(len(piece))
            written.append(piece)
        return "".join(written)

    def tick(self) -> None:
        """Is called in each turn of a loop. The call pays."""

    def whole(self, value: Any) -> Any:
        """Is called for each list, tuple and dict that a template writes. The call pays."""
        return value

    def joined(self, *values: Any) -> str:
        """Works as the operator `~`."""
        self._left.check(self._weight(values))
        return "".join(map(str, values))

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Works as `value[start:stop:step]`."""
        return value[start:stop:step]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Does arithmetic on numbers and texts, and refuses work that would not end or not fit."""
        if operator == "%" and isinstance(left, str | bytes):
            self._check_format(left, right)
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**" and _are_integers(left, right) and left.bit_length() * max(right, 0) > MAX_BITS:
            raise TooMuch("it makes numbers too large")
        return self.made(super().call_binop(context, operator, left, right))

    def made(self, value: Any) -> Any:
        """Pays for a value. One with parts must not be too large as a whole either, parts that it has twice counted
        twice: to compare it or to hash it takes that long, and cannot be interrupted.
        """
        self._left.spend(_size(value))
        if isinstance(value, list | tuple | dict):
            self._left.check(self._weight(value))
        return value

    def call(self, context: Context, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls a method, a macro or a function of a template."""
        method = getattr(work, "__wrapped__", work)  # the sandbox wraps str.format
        given = [*args, *options.values()]
        _check_integers(given)
        if getattr(method, "__name__", "") in GROWING_METHODS:
            subject = getattr(method, "__self__", "")
            if method.__name__.startswith("format"):
                self._check_format(subject, given)
            self._check_growth(subject, given)
        return self.made(super().call(context, work, *args, **options))

    def _bounded(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that checks its arguments and pays for its result."""
        place = 1 if hasattr(work, "jinja_pass_arg") else 0  # of the value, behind a context

        @functools.wraps(work)
        def bounded(*args: Any, **options: Any) -> Any:
            given = [*args[place + 1 :], *options.values()]
            _check_integers(given)
            if name not in PASSING_FILTERS and len(args) > place:
                if name == "format":
                    self._check_format(str(args[place]), given)
                self._check_growth(args[place], given)
            return self.made(work(*args, **options))

        return bounded

    def _shown(self, value: Any) -> Any:
        self._left.check(self._weight(value))
        return value

    def _check_growth(self, subject: Any, given: list[Any]) -> None:
        """Refuses work that may make a text of the product of all sizes, as `replace`, `join` and `indent` do."""
        widths = sum(each for each in given if _are_integers(each) and each > 0)
        self._left.check((1 + self._weight(subject)) * (1 + widths + sum(map(self._weight, given))))

    def _check_format(self, form: str | bytes, given: Any) -> None:
        form = str(form)
        if LONG_WIDTH.search(form):
            raise TooMuch(f"it formats a text to a width above {MAX_WIDTH}")
        self._left.check(len(form) + (form.count("{") + form.count("%")) * (MAX_WIDTH + self._weight(given)))

    def _check_product(self, left: Any, right: Any) -> None:
        if _are_integers(left, right):
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise TooMuch("it makes numbers too large")
            return
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and _are_integers(times):
                self._left.check(self._weight(sequence) * max(times, 0))

    def _weight(self, value: Any) -> int:
        """About how many characters a value takes as text. Stops where that is more than are left."""
        weight, waiting = 0, [value]
        while waiting and weight <= self._left.characters:
            each = waiting.pop()
            if isinstance(each, str | bytes):
                weight += len(each)
            elif isinstance(each, dict):
                waiting += [*each.keys(), *each.values()]
                weight += NODE_CHARACTERS * (1 + 2 * len(each))
            elif isinstance(each, list | tuple):
                waiting += each
                weight += NODE_CHARACTERS * (1 + len(each))
            else:
                weight += SCALAR_CHARACTERS
        return weight


class _Metered(NodeTransformer):
    """Puts a call into every loop, and calls where Jinja has no hook: around operators, and values with parts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [])).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes).set_lineno(node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        places = [each or nodes.Const(None) for each in (node.arg.start, node.arg.stop, node.arg.step)]
        return _call("sliced", [node.node, *places]).set_lineno(node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _call("whole", [node]).set_lineno(node.lineno)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("whole", [node]).set_lineno(node.lineno) if node.ctx == "load" else node


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


class _Generation(Extension):
    """`{% generation %}` marks the text that a model learns to write. It changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict` of a template: makes one, and has no methods that change another."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's `namespace` without names that Python itself looks up, such as `__html__`."""

    def __init__(*args: Any, **attributes: Any) -> None:  # an attribute may be named self
        itself, *rest = args
        given = dict(*rest, **attributes)
        for name in given:
            _check_name(name)
        Namespace.__init__(itself, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # may hold itself


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore; got {name!r}")


def _size(value: Any) -> int:
    """Characters that a value newly takes: texts in a list count, deeper ones are another's."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple):
        return NODE_CHARACTERS * len(value) + sum(len(each) for each in value if isinstance(each, str | bytes))
    return NODE_CHARACTERS * len(value) if isinstance(value, dict) else 0


def _are_integers(*values: Any) -> bool:
    return all(isinstance(value, int) for value in values)


def _check_integers(values: list[Any]) -> None:
    if any(_are_integers(value) and abs(value) > MAX_INTEGER for value in values):
        raise TooMuch(f"it calls for a number above {MAX_INTEGER:,}")


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON that is not escaped for HTML, as templates of chat models expect it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
