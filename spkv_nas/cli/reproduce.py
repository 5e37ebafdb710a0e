"""Command group ``reproduce``: the paper's experiments."""

from __future__ import annotations

import typer

from spkv_nas.cli.options import command
from spkv_nas.stages.reproduce.ablate.command import ablate
from spkv_nas.stages.reproduce.ladder.command import ladder
from spkv_nas.stages.reproduce.palindrome.command import palindrome
from spkv_nas.stages.reproduce.scaling.command import scaling

app = typer.Typer(name="reproduce", no_args_is_help=True, help="Reproduce the paper's experiments.")
COMMANDS = (palindrome, ablate, scaling, ladder)  # in the order of --help
for _function in COMMANDS:
    command(app)(_function)
