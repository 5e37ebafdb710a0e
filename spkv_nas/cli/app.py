"""Build the command-line app and its entry point.

Heavy imports wait until a command runs, so that ``--help`` is quick.
"""

import errno
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from spkv_nas.base import console, errors, extras, interrupt, registry
from spkv_nas.base.distributed import is_lost_process, leave, num_processes, process_index
from spkv_nas.base.progress import Reporter
from spkv_nas.base.version import __version__
from spkv_nas.cli import options, workflows
from spkv_nas.stages.commands import (
    ADDED_COMMANDS,
    COMMAND_GROUPS,
    Command,
    CommandGroup,
    Results,
    runner,
)
from spkv_nas.stages.generate import generate
from spkv_nas.stages.options import (
    plan,
    plan_attention,
    probe,
    propose,
    report,
    score,
    train,
    train_hybrid,
    verdict,
)
from spkv_nas.stages.options.calibrate import CalibrateOptions
from spkv_nas.stages.options.critical_budget import CriticalBudgetOptions
from spkv_nas.stages.options.evaluate.nll import NLLOptions
from spkv_nas.stages.options.export import ExportOptions
from spkv_nas.stages.options.init import InitOptions
from spkv_nas.stages.options.layout import ConvertOptions, DiffOptions, ShowLayoutsOptions
from spkv_nas.stages.schema import schema
from spkv_nas.stages.serve_check import serve_check

# Options that take several files, as a shell expands *.txt
_TAKE_SEVERAL = ("--data", "--data-sets", "--haystack", "--qa", "--include")
_ARGUMENTS = (".yaml", ".yml")  # recipes and layouts: always arguments of the command
DISTRIBUTED = ("train", "train-hybrid", "probe", "evaluate", "score")
# Names itself in a RuntimeError that has no class of its own
_CPU_ALLOCATOR = "DefaultCPUAllocator"
# Seconds before other ranks report an error: rank 0 prints shared ones, then torchrun ends them
OTHERS_WAIT = 5.0
# Options of earlier versions, by command, and what to write instead
_MOVED = {
    ("plan", "--model"): "name the model by place: spkv-nas plan MODEL",
    ("plan attention", "--engine"): "use spkv-nas plan MODEL --engine NAME --layout FILE",
    ("plan attention", "--kv-bytes"): "use spkv-nas plan MODEL --engine NAME --memory SIZE",
}
# Evaluation of a plain ``spkv-nas evaluate``
NLL = Command("nll", runner(NLLOptions), distributed=True)
EVALUATIONS = registry.Registry("spkv_nas.evaluations", "evaluation", Command, (NLL,))
LAYOUT_COMMANDS = (
    runner(ShowLayoutsOptions, "show"),
    runner(DiffOptions, "diff"),
    runner(ConvertOptions, "convert"),
)


class EvaluationGroup(TyperGroup):
    """Group of the registered evaluations. Those of installed packages are imported when ``evaluate`` is used.

    Contexts and commands are those of click, of which some versions of typer have a copy: their types are not named.
    """

    def list_commands(self, _context: object) -> list[str]:
        """Return the names of all evaluations."""
        return list(EVALUATIONS.names)

    def get_command(self, _context: object, name: str) -> Any:
        """Return the command of an evaluation; None if there is none of that name."""
        return built(EVALUATIONS[name]) if name in EVALUATIONS.names else None

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """Put the default evaluation before options that follow ``evaluate``."""
        if not arguments:
            is_missing = not context.resilient_parsing  # else a shell completes evaluations
        else:
            is_option = arguments[0].startswith("-")
            is_missing = is_option and arguments[0] not in context.help_option_names
        if is_missing:
            arguments = [NLL.name, *arguments]
        return super().parse_args(context, arguments)

    def shell_complete(self, context: Any, incomplete: str) -> list[Any]:
        """Complete evaluations, and the options of the default one."""
        items = super().shell_complete(context, incomplete)
        if incomplete.startswith("-"):
            items = items + built(NLL).shell_complete(context, incomplete)
        return items


class TwoWordGroup(TyperGroup):
    """Group of commands, some with names of two words ("plan attention"); added ones are imported when needed."""

    def list_commands(self, context: object) -> list[str]:
        """Return the names of all commands in the order of the workflow, which ``--help`` shows."""
        return [*COMMANDS, *ADDED_COMMANDS.names, *COMMAND_GROUPS.names]

    def get_command(self, context: Any, name: str) -> Any:
        """Return a command, or a group of commands; None if there is none of that name."""
        command = super().get_command(context, name)
        if command:
            return command
        if name in ADDED_COMMANDS.names:
            return built(ADDED_COMMANDS[name])
        if name in COMMAND_GROUPS.names:
            return built(COMMAND_GROUPS[name])
        return None

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        """Take the first two words for a command's name if there is such a command, else the first one."""
        name = " ".join(arguments[:2])
        if name in self.commands:
            arguments = [name, *arguments[2:]]
        return super().resolve_command(context, arguments)


@cache
def built(entry: Command | CommandGroup) -> Any:
    """Return the command of an entry, or its group of commands."""
    if isinstance(entry, Command):
        holder = typer.Typer(add_completion=False)
        options.add_command(holder, entry.run, entry.name)
        return typer.main.get_command(holder)
    holder = typer.Typer(
        name=entry.name, no_args_is_help=True, help=entry.help, add_completion=False
    )
    for function in entry.commands:
        options.add_command(holder, function)
    return typer.main.get_group(holder)


app = typer.Typer(
    name="spkv-nas",
    cls=TwoWordGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Measure which KV heads need global attention, propose hybrid layouts, and validate them by"
        " retraining.\n\nStart with spkv-nas auto MODEL TEXT --out DIR, which finds the smallest KV"
        " cache within a loss and exports the hybrid. To retrain layouts, start with spkv-nas init "
        "MODEL TEXT; each command then prints the next one (next: spkv-nas ...). spkv-nas probe "
        "without arguments measures the embedded reference model (21 layers x 3 KV heads)."
    ),
)
evaluate = typer.Typer(name="evaluate", cls=EvaluationGroup)
layout = typer.Typer(help="Show, compare and convert layout files.", no_args_is_help=True)
for _function in LAYOUT_COMMANDS:
    options.add_command(layout, _function)

# Commands and groups of commands, in the order of --help
COMMANDS: dict[str, Callable[[Any, Reporter], Results | None] | typer.Typer] = {
    "auto": workflows.auto,
    "init": runner(InitOptions),
    "probe": runner(probe.ProbeOptions),
    "propose": runner(propose.ProposeOptions),
    "score": runner(score.ScoreOptions),
    "train-hybrid": runner(train_hybrid.TrainHybridOptions),
    "evaluate": evaluate,
    "verdict": runner(verdict.VerdictOptions),
    "critical-budget": runner(CriticalBudgetOptions),
    "report": runner(report.ReportOptions),
    "generate": generate,
    "export": runner(ExportOptions),
    "serve-check": serve_check,
    "layout": layout,
    "plan": runner(plan.PlanOptions),
    "plan attention": runner(plan_attention.AttentionOptions),
    "calibrate": runner(CalibrateOptions),
    "train": runner(train.TrainOptions),
    "schema": schema,
    "demo": workflows.demo,
}
for _name, _entry in COMMANDS.items():
    if isinstance(_entry, typer.Typer):
        app.add_typer(_entry, name=_name)
    else:
        options.add_command(app, _entry, _name)


def _version(value: bool) -> None:
    """Print the version and exit."""
    if value:
        console.out.print(f"spkv-nas {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    workspace: options.Root = None,
    device: options.Device = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    if num_processes() > 1 and (name := context.invoked_subcommand) not in DISTRIBUTED:
        raise errors.UserError(
            f"{name} does not run under torchrun (only {', '.join(DISTRIBUTED)} do): "
            "run it without torchrun"
        )


@evaluate.callback()
def _check_processes(context: typer.Context) -> None:
    """Evaluate a checkpoint on text, tasks or questions. Without a subcommand, runs evaluate nll."""
    name = context.invoked_subcommand
    if name is not None and num_processes() > 1 and not EVALUATIONS[name].distributed:
        distributed = ", ".join(entry.name for entry in EVALUATIONS if entry.distributed)
        raise errors.UserError(
            f"evaluate {name} does not run under torchrun (only {distributed} do): "
            "run it without torchrun"
        )


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, by default ``sys.argv[1:]``, and exit with its code.

    Exit codes: 0 on success, 1 for a bug, 2 for an error that the user can fix, 130 after Ctrl-C and 143 after SIGTERM
    (training saves a checkpoint first), 141 if the reader of the output ended, such as ``head``; ``verdict`` and
    ``critical-budget`` return their answer.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    console.escape_unencodable()
    try:
        # Run the command, and exit with its code
        with interrupt.raising():
            code = app(name_each(arguments), standalone_mode=False)
        if code:
            sys.exit(code)
        leave(0)
    except Exception as error:
        if "--debug" in arguments:
            raise
        # On other ranks, let rank 0 report an error first
        if process_index():
            # After a lost process, rank 0 itself may be gone, and this rank must report at once
            if not is_lost_process(error):
                time.sleep(OTHERS_WAIT)
            console.err.quiet = False
        # Print the message, and exit with the error's code
        message, code = explained(error)
        if message:
            with _unless_closed():
                console.fail(message)
        sys.exit(code)
    except interrupt.Interrupted as stop:
        with _unless_closed():
            console.err.print(f"interrupted by {stop}: run the same command again to resume")
        leave(stop.exit_code)
        sys.exit(stop.exit_code)


def _unless_closed() -> AbstractContextManager[None]:
    """Return a context in which a message is lost, not the exit code, if nobody reads standard error any more."""
    return suppress(OSError, console.NoReader)


def explained(error: Exception) -> tuple[str, int]:
    """Return the message for an error, "" if the help was printed instead, and the exit code: 1 for a bug, else 2."""
    for_user = _for_user(error)
    if for_user is not None:
        return for_user, 2
    # Limits of the machine
    message = errors.shortened(errors.first_line(error), 2000)
    message = errors.shortened(errors.printable(message), 300)
    if _is_out_of_memory(error):
        return f"out of memory: {message}\nuse a smaller batch, block, text or model", 2
    if isinstance(error, OSError):
        return _about_system(error, message), 2
    if sys.flags.optimize > 1:
        hint = "transformers needs docstrings: run Python without -OO (PYTHONOPTIMIZE=2)"
        return f"{message}\n{hint}", 2
    # Bugs
    name = type(error).__name__
    bug = name if message == name else f"{name}: {message}"
    return (
        f"{bug}\nthis is a bug in spkv-nas, unless the machine ran out of disk or memory; "
        "put --debug before the command for a traceback",
        1,
    )


def _for_user(error: Exception) -> str | None:
    """Return the message of an error that says what the user should change, or repeat; None for others."""
    if isinstance(error, errors.UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        missing = extras.missing_extra(error)
        if missing is not None:
            return str(missing)
    if hasattr(error, "format_message"):  # a usage error raised by typer or click
        message: str = error.format_message()
        if not message:  # no command was named: typer has printed the help already
            return message
        command_path = getattr(getattr(error, "ctx", None), "command_path", "spkv-nas")
        option = getattr(error, "option_name", "")
        for (command, moved), advice in _MOVED.items():
            if option == moved and command_path.endswith(f" {command}"):
                return f"{command} has no option {option} any more\n{advice}"
        return f"{message}\nsee '{command_path} --help'{registry.reinstall_hint()}"
    if is_lost_process(error):
        return "another process of this run has exited\nrun the same command again to resume"
    return None


def _about_system(error: OSError, message: str) -> str:
    """Return the message for an error of the system, such as a full disk, with the path if it has one."""
    path_note = ""
    if isinstance(error.filename, str) and error.filename not in message:
        path_note = f" ({error.filename})"
    advice = "check free space and permissions, or use another path"
    return str(errors.UserError(f"{message}{path_note}\n{advice}"))


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out in Python, in a system call, on a GPU, or in PyTorch's allocator for the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def name_each(arguments: Sequence[str]) -> list[str]:
    """Repeat an option before each file that follows it: ``--data a b`` becomes ``--data a --data b``.

    This holds for ``--data`` and the other options that take files, up to the next option. Recipes and layouts (YAML)
    stay arguments of the command.
    """
    expanded: list[str] = []
    option = ""
    has_value = False
    for number, word in enumerate(arguments):
        if word == "--":  # only arguments follow
            return [*expanded, *arguments[number:]]
        if option and not has_value:
            has_value = True
        # Options end the list of files
        elif word.startswith("-"):
            option = word if word in _TAKE_SEVERAL else ""
            has_value = False
        elif option and not word.lower().endswith(_ARGUMENTS):
            expanded.append(option)
        else:
            option = ""
        expanded.append(word)
    return expanded
