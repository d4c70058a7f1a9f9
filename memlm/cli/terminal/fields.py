"""Command-line options from the fields of dataclasses, so that each default and help text is written once.

A command takes a whole dataclass, and its fields become options by their metadata (`memlm.base.options`):

    @app.command()
    @with_fields(leave_out=("session", "resume_s"))
    def generate(request: GenerateRequest, model: options.Model) -> None: ...

A parameter of type `Annotated[dict[str, Any], Overrides(TrainConfig)]` gets only the fields that were given. Fields
that are dataclasses are expanded in their place. Fields without metadata keep their defaults.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from types import NoneType
from typing import Annotated, Any, Optional, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from memlm.api.datastores import INDEX
from memlm.api.params import SERVER
from memlm.base.options import OPTION, RESEARCH, Option, format_bytes, parse_bytes
from memlm.errors import InvalidInput

FIRST, LAST = (None, "Model", SERVER), ("Output", INDEX, "Cluster", RESEARCH)  # panels; the others stand between these


@dataclass(frozen=True, slots=True)
class Overrides:
    """Marks a parameter that gets a dict of the fields that were given, instead of a whole dataclass."""

    record: type


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One field of a dataclass, or of a dataclass in it, that is an option."""

    path: tuple[str, ...]
    field: Field[Any]
    hint: Any
    option: Option

    @property
    def parameter(self) -> str:
        """The parameter's name, as in environment variables and settings files: that of the first long flag."""
        return self.flags[0].removeprefix("--").replace("-", "_") if self.flags[0].startswith("--") else self.field.name

    @property
    def flags(self) -> tuple[str, ...]:
        name = self.field.name.removeprefix("num_").removesuffix("_s").replace("_", "-")
        return self.option.flags or (f"--{name}",)

    @property
    def flag(self) -> str:
        """The word that users type: the first long flag, or the name of an argument or of a setting."""
        if self.option.is_setting:
            return self.parameter
        if self.is_argument:
            return self.field.name.upper()
        return next(
            (flag for flag in " ".join(self.flags).replace("/", " ").split() if flag.startswith("--")), self.field.name
        )

    @property
    def is_argument(self) -> bool:
        return self.field.default is MISSING and self.field.default_factory is MISSING and not self.option.flags

    @property
    def is_repeated(self) -> bool:
        return get_origin(self.hint) is tuple

    @property
    def default(self) -> Any:
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()

    def click_type(self, *, override: bool) -> Any:
        """The type that Typer reads."""
        kinds = [kind for kind in get_args(self.hint) if kind not in (NoneType, ...)]
        kind: Any = str if self.option.parse else kinds[0] if kinds else self.hint
        if self.is_repeated:
            return list[kind] if self.is_argument else Optional[list[kind]]  # noqa: UP045
        is_flag = kind is bool and not override
        return kind if self.is_argument or is_flag else Optional[kind]  # noqa: UP045

    def parameter_of(self, *, override: bool) -> inspect.Parameter:
        """The parameter of the command."""
        option, default = self.option, self.default
        is_required = default is MISSING and (self.is_argument or not override)
        if self.is_argument:
            info: Any = typer.Argument(help=option.help, metavar=option.metavar or self.field.name.upper())
        else:
            if default in ((), "", MISSING) or override:
                default = None
            elif option.parse is parse_bytes and default is not None:
                default = None if option.default else format_bytes(default)
            info = typer.Option(
                *self.flags, help=option.help, metavar=option.metavar, rich_help_panel=option.panel, show_envvar=False,
                show_default=option.default or not isinstance(default, bool), hidden=option.is_setting,
            )  # fmt: skip
        default = inspect.Parameter.empty if is_required else default
        annotation: Any = Annotated[self.click_type(override=override), info]
        return inspect.Parameter(self.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def value(self, given: Any) -> Any:
        """The value of the field that the command line gave."""
        parse = self.option.parse or (lambda value: value)
        try:
            return tuple(map(parse, given)) if self.is_repeated else parse(given)
        except InvalidInput as error:
            raise typer.BadParameter(f"{self.flag}: {error}") from None


def _leaves(record: type, leave_out: Collection[str], path: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    hints = get_type_hints(record)
    for field in fields(record):
        if is_dataclass(hints[field.name]):
            yield from _leaves(hints[field.name], leave_out, (*path, field.name))
        elif OPTION in field.metadata and field.name not in leave_out:
            yield _Leaf((*path, field.name), field, hints[field.name], field.metadata[OPTION])


def _renamed(error: InvalidInput, flags: Mapping[str, str]) -> InvalidInput:
    """The error with the flag in place of the name of its field."""
    if error.field not in flags:
        return error
    # A name with _ is a name wherever it stands; `port` or `store` may be a word of the sentence, but at its beginning.
    name = re.escape(error.field)
    pattern = rf"(?<![\w-]){name}(?![\w-])" if "_" in error.field else rf"\A{name}(?= (?:is|has|names)\b)"
    return InvalidInput(re.sub(pattern, flags[error.field], str(error)), field=error.field)


def _build(record: type, values: dict[tuple[str, ...], Any]) -> Any:
    """The dataclass with some fields, given by their paths."""
    arguments = {path[0]: value for path, value in values.items() if len(path) == 1}
    hints = get_type_hints(record)
    for name in {path[0] for path in values if len(path) > 1}:
        arguments[name] = _build(hints[name], {path[1:]: value for path, value in values.items() if path[0] == name})
    for field in fields(record):  # a text that is needed, and left out here, is filled in by the command
        if field.default is MISSING and field.default_factory is MISSING and hints[field.name] is str:
            arguments.setdefault(field.name, "")
    return record(**arguments)


def _flag_of(parameter: inspect.Parameter) -> str:
    """The flag of a parameter that is called otherwise."""
    infos = [mark for mark in getattr(parameter.annotation, "__metadata__", ()) if isinstance(mark, OptionInfo)]
    # In an annotation, typer takes the first flag for the default that it does not have there.
    given = [each for info in infos for each in (info.default, *(info.param_decls or ()))]
    return next((each for each in given if isinstance(each, str) and each.startswith("--")), "")


def _place_of_panel(parameter: inspect.Parameter) -> tuple[int, bool]:
    """Help shows panels in the order of their first options: those of every call first, those of research last, and
    settings behind them.
    """
    marks = getattr(parameter.annotation, "__metadata__", ())
    panel = next((mark.rich_help_panel for mark in marks if hasattr(mark, "rich_help_panel")), None)
    if any(getattr(mark, "hidden", False) for mark in marks):
        return len(LAST) + 1, True
    place = FIRST.index(panel) - len(FIRST) if panel in FIRST else 1 + LAST.index(panel) if panel in LAST else 0
    return place, parameter.default is not inspect.Parameter.empty


class CommandWithSettings(TyperCommand):
    """A command that takes its settings from a file and the environment, and not among its options."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for parameter in self.params:
            if getattr(parameter, "hidden", False):
                parameter.opts, parameter.param_type_name = [], "setting"


def with_fields(*, leave_out: Collection[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces the parameters of a command that are dataclasses by one option for each field."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        records: dict[str, tuple[type, bool, list[_Leaf]]] = {}
        for parameter in inspect.signature(command).parameters.values():
            hint = hints[parameter.name]
            marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Overrides)]
            record = marks[0].record if marks else hint
            if isinstance(record, type) and is_dataclass(record):
                leaves = list(_leaves(record, leave_out))
                records[parameter.name] = record, bool(marks), leaves
                parameters += [leaf.parameter_of(override=bool(marks)) for leaf in leaves]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint))

        own = {each.name: flag for each in parameters if (flag := _flag_of(each))}

        @wraps(command)
        def run(**given: Any) -> Any:
            flags = own | {leaf.field.name: leaf.flag for _, _, leaves in records.values() for leaf in leaves}
            try:
                for name, (record, is_override, leaves) in records.items():
                    values = {}
                    for leaf in leaves:
                        if (value := given.pop(leaf.parameter)) is not None and value != []:
                            values[leaf.path] = leaf.value(value)
                    named = {path[-1]: value for path, value in values.items()}
                    given[name] = named if is_override else _build(record, values)
                return command(**given)
            except InvalidInput as error:
                raise _renamed(error, flags) from None

        parameters.sort(key=_place_of_panel)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
