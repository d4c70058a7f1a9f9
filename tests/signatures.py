"""Shapes and types in signatures, checked while tests run: every call, of what is imported after this.

As jaxtyping's own import hook does it, in a fraction of its time: most functions name no array, for which beartype
alone will do; each argument is looked at once, not twice; and an array that is what it should be is passed at a glance.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from inspect import isclass
from types import CodeType, ModuleType
from typing import Any, get_args, get_type_hints

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, jaxtyped
from jaxtyping._storage import get_shape_memo

PACKAGES = (
    "memlm.index",
    "memlm.model",
    "memlm.retrieval.encoder",
    "memlm.retrieval.interpolation",
    "memlm.generation.sampling",
    "memlm.data.windows",
    "memlm.generation.scoring",
    "memlm.retrieval.store",
    "memlm.indexing.quality",
    "memlm.indexing.tune",
    "memlm.data.tokenizer",
    "memlm.training.data",
    "memlm.training.train",
    "memlm.training.init_from",
    "memlm.training.trainer",
    "memlm.training.config",
    "memlm.generation.generation",
    "memlm.indexing.build",
    "memlm.evaluation",
)
NAME = "checked_signature"
AS_TYPE_ERRORS = BeartypeConf(violation_type=TypeError)


def checked(made: Any) -> Any:
    """A function that refuses arguments and results that its signature does not allow; a dataclass likewise."""
    if isclass(made):
        if is_dataclass(made):
            made.__init__ = checked(made.__init__)  # type: ignore[misc]
        return made
    hints = {name: _resolved(hint, made.__globals__) for name, hint in made.__annotations__.items()}
    made.__annotations__ = hints
    check: Callable[..., Any] = beartype(made, conf=AS_TYPE_ERRORS)
    if not any(map(_names_an_array, hints.values())):
        return check

    @wraps(made)
    def with_shapes(*args: Any, **kwargs: Any) -> Any:
        with jaxtyped("context"):  # the same letter is the same length throughout
            return check(*args, **kwargs)

    return with_shapes


class Finder(MetaPathFinder):
    """Finds what others find, and has it checked."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not any(name == package or name.startswith(package + ".") for package in PACKAGES):
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                assert isinstance(spec.loader, SourceFileLoader), name
                spec.loader = Loader(spec.loader.name, spec.loader.path)
                return spec
        return None


class Loader(SourceFileLoader):
    """Decorates every function and class, before any other decorator sees a function and after all of a class."""

    def get_code(self, fullname: str) -> CodeType:
        tree = Decorated().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[NAME] = checked
        super().exec_module(module)


class Decorated(ast.NodeTransformer):
    """A module's text, with `checked` where it belongs."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list.append(ast.Name(NAME, ast.Load()))
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.decorator_list.insert(0, ast.Name(NAME, ast.Load()))
        self.generic_visit(node)
        return node


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """A hint that is text, looked up; what cannot be known while a module is being imported allows anything."""

    def hinted() -> None: ...

    hinted.__annotations__ = {"hint": hint}
    try:
        return get_type_hints(hinted, names, include_extras=True)["hint"]
    except NameError:
        return Any


def _names_an_array(hint: Any) -> bool:
    return (isclass(hint) and issubclass(hint, AbstractArray)) or any(map(_names_an_array, get_args(hint)))


def _glance(hint: Any) -> Callable[[Any], bool]:
    """Whether an array surely is what a hint allows, lengths included that are known in this call; those that are not
    become known. What is not sure is for jaxtyping to judge, and so are lengths that have to be worked out.
    """
    words = hint.dim_str.split()
    runs = [place for place, word in enumerate(words) if word.startswith("*")]
    lengths = [int(word) if word.isdigit() else word for word in words if not word.startswith("*")]
    named = (word.removeprefix("*") for word in words if not word.isdigit())
    if len(runs) > 1 or not all(map(str.isalpha, named)) or not isinstance(hint.dtypes, (list, tuple)):
        return lambda array: False
    count, of_type, sure_kind = len(lengths), hint.array_type, None
    run, begin = (words[runs[0]][1:], runs[0]) if runs else ("", count)
    behind = count - begin

    def is_sure(array: Any) -> bool:
        nonlocal sure_kind
        if not isinstance(array, of_type):
            return False
        shape, kind = array.shape, array.dtype
        if kind is not sure_kind:  # to look one up takes longer
            if str(kind).removeprefix("torch.") not in hint.dtypes:
                return False
            sure_kind = kind
        known, known_runs, *_ = get_shape_memo()
        if run:
            end = len(shape) - behind
            if end < begin:
                return False
            held = (False, shape[begin:end])  # as jaxtyping keeps it: not to be broadcast
            if known_runs.get(run, held) != held:
                return False
            shape = shape[:begin] + shape[end:]
        elif len(shape) != count:
            return False
        before = known.copy()
        for mine, length in zip(lengths, shape):  # noqa: B905 - of one length
            if length != (mine if mine.__class__ is int else known.setdefault(mine, length)):
                known.clear()
                known.update(before)
                return False
        if run:
            known_runs[run] = held
        return True

    return is_sure


GLANCES: dict[Any, Callable[[Any], bool]] = {}
JUDGED = type(AbstractArray).__instancecheck__


def _is_allowed(hint: Any, array: Any) -> bool:
    if hint not in GLANCES:
        GLANCES[hint] = _glance(hint)
    return GLANCES[hint](array) or JUDGED(hint, array)


type(AbstractArray).__instancecheck__ = _is_allowed  # type: ignore[method-assign]
sys.meta_path.insert(0, Finder())
