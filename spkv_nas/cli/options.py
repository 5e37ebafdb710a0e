"""Turn a function of one options dataclass (``stages.options``) into a command: each field becomes an option.

The options that commands share (``--workspace``, ``--device``, ``--quiet``, ``--verbose``, ``--debug``, ``--json``) are
declared and handled here; all but the last may also precede the command's name. With ``--dry-run`` a training command
prints its plan instead of training. Results are printed as text for people or, with ``--json``, as one JSON document.
"""

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import MISSING, Field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from pydantic_core import to_jsonable_python
from rich.text import Text

from spkv_nas.base import console, progress
from spkv_nas.base.flag import NOTE, SHOWN, Flag
from spkv_nas.base.workspace import Workspace
from spkv_nas.cli import screen
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.commands import Result, Results, next_line
from spkv_nas.stages.flags import DEVICE, WORKSPACE
from spkv_nas.stages.options import OnDevice, TakesLong, Trains

Options = TypeVar("Options")
_LAST = "dtype"  # shown last in the help
_FEW = 3  # help panels with at most this many options are merged into the default one
_LARGE = 10_000  # numbers beyond it are not shown as bounds in the help: nobody comes near them

_shared = partial(typer.Option, rich_help_panel="Shared options")
Root = Annotated[
    Path | None, _shared(*WORKSPACE.names, help=WORKSPACE.help, show_default="current folder")
]
Device = Annotated[
    str | None, _shared(*DEVICE.names, help=DEVICE.help, show_default="cuda if available")
]
Quiet = Annotated[bool, _shared("--quiet", "-q", help="Print only results, warnings and errors.")]
Verbose = Annotated[bool, _shared("--verbose", "-v", help="Also show details and library logs.")]
Debug = Annotated[bool, _shared("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, _shared("--json", help="Print the result as one JSON document.")]
# ``app.main`` reads debug
_SHARED = {
    "workspace": Root,
    "device": Device,
    "quiet": Quiet,
    "verbose": Verbose,
    "debug": Debug,
}


def add_command(
    app: typer.Typer,
    function: Callable[[Options, progress.Reporter], Results | None],
    name: str | None = None,
) -> None:
    """Add a function to ``app`` as a command, by default of the function's name, with dashes.

    The function takes an options dataclass and a reporter; its docstring is the help. Its result is printed, with
    ``--json`` as one JSON document. A function that is declared to return None prints by itself and has no ``--json``.
    """
    # Read the options class from the annotations
    hints = get_type_hints(function)
    returns = hints.pop("return", None)
    options_class: type[Options] = next(iter(hints.values()))

    def run(invocation: typer.Context, **values: Any) -> None:
        raise typer.Exit(_run(function, options_class, invocation, values))

    # Give typer the signature that it reads the options from
    parameters = [
        inspect.Parameter("invocation", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *_parameters(options_class),
        *_shared_parameters(options_class, has_result=returns is not type(None)),
    ]
    run.__doc__ = _help(function)
    run.__name__ = function.__name__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name or function.__name__.replace("_", "-"))(run)


def _run(
    function: Callable[[Options, progress.Reporter], Results | None],
    options_class: type[Options],
    invocation: typer.Context,
    values: dict[str, Any],
) -> int:
    """Run a command with the values that typer parsed, print its result, and return its exit code."""
    from spkv_nas.stages.checks import check  # pandas takes too long for --help

    # Take the shared options out of the values; they may stand before the command's name
    root = invocation.find_root()
    shared = {key: values.pop(key, None) or root.params.get(key) for key in (*_SHARED, "json")}
    for field in fields(options_class):  # type: ignore[arg-type]
        if shared.get(field.name):
            values[field.name] = shared[field.name]
    quiet = bool(shared["quiet"])
    verbose = bool(shared["verbose"])
    # Build and check the options; a GGUF file is converted when it is first checked, which is announced
    options = options_class(**values)
    with screen.messages(quiet=quiet, verbose=verbose):
        check(options)
    # Run the command and print its result
    title = invocation.command_path.removeprefix(f"{root.info_name} ")
    takes_long = isinstance(options, TakesLong)
    with screen.working(title, quiet=quiet, verbose=verbose, takes_long=takes_long) as reporter:
        if isinstance(options, OnDevice):
            with suppress(ModuleNotFoundError):  # the command says what to install
                quiet_transformers(reporter)
        if isinstance(options, Trains) and options.dry_run:
            from spkv_nas.stages.dry_run import dry_run

            results: Results | None = dry_run(options, reporter)
        else:
            results = function(options, reporter)
        return 0 if results is None else print_results(results, as_json=bool(shared["json"]))


def _help(function: Callable[..., Any]) -> str:
    """Return a function's docstring with a line for each paragraph: typer keeps the line breaks of the source."""
    paragraphs = (function.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _shared_parameters(options_class: type, *, has_result: bool) -> list[inspect.Parameter]:
    """Return the parameters of the shared options: ``--json`` if there is a result to print, and those that apply."""
    names = [field.name for field in fields(options_class)]
    kinds: dict[str, object] = {"json": Json} if has_result else {}
    for key, kind in _SHARED.items():
        if key in names or key not in ("workspace", "device"):
            kinds[key] = kind
    by_name = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(key, by_name, default=None, annotation=kind)
        for key, kind in kinds.items()
    ]


def _parameters(options_class: type) -> list[inspect.Parameter]:
    """Return a command's parameters: arguments first, then options, in the order of the fields."""
    hints = get_type_hints(options_class, include_extras=True)
    declared = [field for field in fields(options_class) if field.name not in _SHARED]
    flags: dict[str, Flag] = {field.name: hints[field.name].__metadata__[0] for field in declared}
    declared.sort(key=lambda field: _order(field, flags[field.name]))
    sizes = Counter(flags[field.name].panel for field in declared)
    parameters = []
    for field in declared:
        flag = flags[field.name]
        panel = flag.panel if sizes[flag.panel] > _FEW else None
        parameters.append(_parameter(field, hints[field.name].__origin__, flag, panel))
    return parameters


def _order(field: Field[Any], flag: Flag) -> tuple[bool, bool, bool]:
    """Return the key that sorts arguments before options, required before others, and ``_LAST`` to the end."""
    return (not flag.argument, field.name == _LAST, field.default is not MISSING)


def _shown_bound(bound: float | None) -> float | None:
    """Return a bound to show in the help; None beyond ``_LARGE``."""
    return None if bound is None or abs(bound) > _LARGE else bound


def _check_bounds(flag: Flag) -> Callable[[float | None], float | None] | None:
    """Return typer's callback that checks bounds which are not shown; None if typer checks all that there are."""
    if _shown_bound(flag.low) == flag.low and _shown_bound(flag.high) == flag.high:
        return None
    low = -math.inf if flag.low is None else flag.low
    high = math.inf if flag.high is None else flag.high

    def check(value: float | None) -> float | None:
        if value is not None and not low <= value <= high:
            raise typer.BadParameter(f"{value} is not between {low:,} and {high:,}")
        return value

    return check


def _parameter(field: Field[Any], kind: Any, flag: Flag, panel: str | None) -> inspect.Parameter:
    """Return the parameter of one field, with the help, limits and completion of its flag, in a panel of the help."""
    shown_default = field.metadata.get(SHOWN)
    declare = typer.Argument if flag.argument else partial(typer.Option, *flag.names)
    info = declare(
        help=f"{flag.help} {field.metadata.get(NOTE, '')}".rstrip(),
        metavar=flag.metavar,
        min=_shown_bound(flag.low),
        max=_shown_bound(flag.high),
        callback=_check_bounds(flag),
        rich_help_panel=panel,
        show_default=True if shown_default is None else shown_default,
        autocompletion=completion(flag),
    )
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    by_name = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, by_name, default=default, annotation=Annotated[kind, info])


def completion(flag: Flag) -> Callable[[typer.Context, str], list[str]] | None:
    """Return the function that completes an option's value, or None to let the shell complete file names."""
    if not flag.values and not flag.is_probe:
        return None

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        if flag.is_probe:
            own = context.params.get("workspace")
            folder = own or context.find_root().params.get("workspace") or "."
            values: Iterable[str] = Workspace(Path(folder)).probes()
        else:
            values = flag.values() if callable(flag.values) else flag.values
        return [value for value in values if value.startswith(incomplete)]

    return complete


def print_results(output: Results, *, as_json: bool) -> int:
    """Print a command's results as they arrive, or all as one JSON document; return the highest exit code."""
    # Several results are the steps of one workflow: drop the suggestions in between
    if isinstance(output, Result):
        results: Iterable[Result] = (output,)
    else:
        results = (replace(result, next=()) for result in output)
    documents: list[Any] = []
    code = 0
    # Print each result as it arrives, or collect them for the document
    for result in results:
        code = max(code, result.exit_code)
        if as_json:
            documents.append(_document(result))
        else:
            _print(result)
    if as_json:
        printed = documents[0] if isinstance(output, Result) else documents
        # Escapes of JSON, where other encodings would replace characters
        is_ascii = not console.out.encoding.startswith("utf")
        text = json.dumps(printed, indent=2, ensure_ascii=is_ascii, allow_nan=False)
        console.out.write(text + "\n")
    return code


def _document(result: Result) -> Any:
    """Return the JSON document of a result, with the commands that it suggests."""
    document = plain(result.document(result.value))
    commands = [suggestion.command for suggestion in result.next if suggestion.command]
    return {**document, "next": commands} if commands else document


def _print(result: Result) -> None:
    """Print a result, then the reason of each suggestion and its command on one unwrapped line."""
    result.show(result.value)
    for suggestion in result.next:
        if suggestion.reason:
            console.say(suggestion.reason)
        if suggestion.command:
            console.out.print(Text(next_line(suggestion.command)), soft_wrap=True)


def plain(value: Any) -> Any:
    """Return a value in JSON's types: numbers unrounded, NaN and infinity as null, tables as rows, paths as text."""
    return to_jsonable_python(value, inf_nan_mode="null", fallback=_from_numpy)


def _from_numpy(value: Any) -> Any:
    """Return a pandas table as rows, and an array or a NumPy scalar as Python's types."""
    return value.to_dict("records") if hasattr(value, "to_dict") else value.tolist()
