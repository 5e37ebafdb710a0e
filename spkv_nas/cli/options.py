"""Make a command of a function that takes one dataclass of ``stages.options``: its fields become the command line.

What holds for every command, how much it says and in which form, is declared here once, and taken before the command
and after it. The plan of ``--dry-run`` takes the place of whatever trains.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from spkv_nas.base.progress import Reporter
from spkv_nas.cli import show_plan
from spkv_nas.cli.completion import completion
from spkv_nas.cli.result import Results, present
from spkv_nas.cli.screen import working
from spkv_nas.stages.flags import Flag
from spkv_nas.stages.options import NOTE, SHOWN, OnDevice, Trains

Options = TypeVar("Options")
_LAST = ("workspace", "device", "dtype")  # in the help
_FEW = 3  # options that need no panel of their own
_SAYING = "What is said"

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print results, warnings and errors alone.", rich_help_panel=_SAYING)
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Say details too, and what libraries say.", rich_help_panel=_SAYING),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_SAYING)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.", rich_help_panel=_SAYING)]
_OF_ALL = {"quiet": Quiet, "verbose": Verbose, "debug": Debug}  # main reads --debug, which errors before a command need


@dataclass(frozen=True)
class Voice:
    """How much is said, as the options before the command have it."""

    quiet: bool = False
    verbose: bool = False


def command(
    app: typer.Typer,
) -> Callable[[Callable[[Options, Reporter], Results | None]], Callable[..., None]]:
    """Add a function of an options dataclass and a reporter to ``app``; its docstring is the help.

    What it returns is printed, as JSON where that is asked for; a function that returns nothing prints by itself.
    """

    def register(function: Callable[[Options, Reporter], Results | None]) -> Callable[..., None]:
        hints = get_type_hints(function)
        returns = hints.pop("return", None)
        taken: type[Options] = next(iter(hints.values()))
        name = function.__name__.replace("_", "-")

        def run(invocation: typer.Context, **values: Any) -> None:
            from spkv_nas.stages.checks import check  # pandas takes too long for --help

            said = invocation.obj or Voice()
            quiet, verbose = (values.pop(key) or getattr(said, key) for key in ("quiet", "verbose"))
            as_json = values.pop("json", False)
            del values["debug"]
            given = taken(**values)
            check(given)
            with working(name, quiet=quiet, verbose=verbose, takes_long=isinstance(given, OnDevice)) as reporter:
                if isinstance(given, Trains) and given.dry_run:
                    found: Results | None = show_plan.dry_run(given, reporter)
                else:
                    found = function(given, reporter)
                code = 0 if found is None else present(found, as_json=as_json)
            raise typer.Exit(code)

        run.__doc__, run.__name__ = function.__doc__, function.__name__
        common = _OF_ALL if returns is type(None) else {"json": Json, **_OF_ALL}
        parameters = [_context(), *_parameters(taken), *(_common(*one) for one in common.items())]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command()(run)
        return run

    return register


def _context() -> inspect.Parameter:
    return inspect.Parameter("invocation", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def _common(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


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
        "autocompletion": completion(flag),
    }
    info = typer.Argument(**words) if flag.argument else typer.Option(*flag.names, **words)
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if one.default is MISSING else one.default,
        annotation=Annotated[kind, info],
    )
