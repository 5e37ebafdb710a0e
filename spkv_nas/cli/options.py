"""Make a command of a function that takes one dataclass of ``stages.options``: its fields become the command line."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, replace
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from spkv_nas.stages.flags import Flag
from spkv_nas.stages.options import NOTE, SHOWN

Options = TypeVar("Options")
_LAST = ("workspace", "device", "dtype")  # in the help
_FEW = 3  # options that need no panel of their own


def command(app: typer.Typer) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Add a function of one parameter, an options dataclass, to ``app``; its docstring is the help."""

    def register(function: Callable[[Options], None]) -> Callable[..., None]:
        taken: type[Options] = next(iter(get_type_hints(function).values()))

        def run(**values: Any) -> None:
            function(taken(**values))

        run.__doc__, run.__name__ = function.__doc__, function.__name__
        parameters = _parameters(taken)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command()(run)
        return run

    return register


def _parameters(taken: type) -> list[inspect.Parameter]:
    """Arguments first, then options, in the order of the fields."""
    hints = get_type_hints(taken, include_extras=True)
    declared = [(one, *_declaration(hints[one.name])) for one in fields(taken)]
    panels = Counter(flag.panel for _, _, flag in declared)
    declared = [
        (one, kind, flag if panels[flag.panel] > _FEW else replace(flag, panel=None)) for one, kind, flag in declared
    ]
    declared.sort(key=lambda row: (not row[2].argument, row[0].name in _LAST, row[0].default is not MISSING))
    return [_parameter(*row) for row in declared]


def _declaration(hint: Any) -> tuple[Any, Flag]:
    """The type of an annotated field, and its flag."""
    kind, flag = hint.__origin__, hint.__metadata__[0]
    assert isinstance(flag, Flag)
    return kind, flag


def _parameter(one: Field[Any], kind: Any, flag: Flag) -> inspect.Parameter:
    shown = one.metadata.get(SHOWN)
    words: dict[str, Any] = {
        "help": f"{flag.help} {one.metadata.get(NOTE, '')}".rstrip(),
        "metavar": flag.metavar,
        "min": flag.low,
        "max": flag.high,
        "rich_help_panel": flag.panel,
        "show_default": True if shown is None else shown,
    }
    info = typer.Argument(**words) if flag.argument else typer.Option(*flag.names, **words)
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if one.default is MISSING else one.default,
        annotation=Annotated[kind, info],
    )
