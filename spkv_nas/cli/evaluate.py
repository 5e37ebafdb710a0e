"""List the evaluations, and make them the subcommands of ``evaluate``; without one, it runs the default."""

from functools import cache
from typing import Any

import typer
from typer.core import TyperGroup

from spkv_nas.base.distributed import num_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.registry import Registry
from spkv_nas.cli.options import command
from spkv_nas.stages.command_group import runner
from spkv_nas.stages.evaluate.evaluation import Evaluation
from spkv_nas.stages.options.evaluate.nll import NLLOptions

NLL = Evaluation("nll", runner(NLLOptions), distributed=True)
EVALUATIONS = Registry("spkv_nas.evaluations", "evaluation", Evaluation, (NLL,))
DEFAULT = NLL.name  # evaluation of a plain ``spkv-nas evaluate``


class EvaluationGroup(TyperGroup):
    """Group of the registered evaluations. Those of installed packages are imported when ``evaluate`` is used.

    Contexts and commands are those of click, of which some versions of typer have a copy: their types are not named.
    """

    def list_commands(self, _context: Any) -> list[str]:
        """Return the names of all evaluations."""
        return list(EVALUATIONS.names)

    def get_command(self, _context: Any, name: str) -> Any:
        """Return the command of an evaluation; None if there is none of that name."""
        return _command(name) if name in EVALUATIONS.names else None

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """Put the default evaluation before options that follow ``evaluate``."""
        is_help = arguments[:1] and arguments[0] in context.help_option_names
        is_completed = not arguments and context.resilient_parsing
        if not (is_help or is_completed) and (not arguments or arguments[0].startswith("-")):
            arguments = [DEFAULT, *arguments]
        return super().parse_args(context, arguments)

    def shell_complete(self, context: Any, incomplete: str) -> list[Any]:
        """Complete evaluations, and the options of the default one."""
        items = super().shell_complete(context, incomplete)
        return items + _command(DEFAULT).shell_complete(context, incomplete) if incomplete.startswith("-") else items


@cache
def _command(name: str) -> Any:
    holder = typer.Typer(add_completion=False)
    command(holder, name)(EVALUATIONS[name].run)
    return typer.main.get_command(holder)


app = typer.Typer(name="evaluate", cls=EvaluationGroup)


@app.callback()
def _check_processes(context: typer.Context) -> None:
    """Evaluate a checkpoint on text, tasks or questions. Without a subcommand, runs evaluate nll."""
    name = context.invoked_subcommand
    if name is not None and num_processes() > 1 and not EVALUATIONS[name].distributed:
        distributed = ", ".join(entry.name for entry in EVALUATIONS if entry.distributed)
        raise UserError(f"evaluate {name} does not run under torchrun (only {distributed} do): run it without torchrun")
