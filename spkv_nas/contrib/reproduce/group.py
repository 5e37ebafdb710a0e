"""Command group ``reproduce``: the paper's experiments."""

from __future__ import annotations

from spkv_nas.contrib.reproduce.ablate.options import AblateOptions
from spkv_nas.contrib.reproduce.ladder.command import ladder
from spkv_nas.contrib.reproduce.palindrome.options import PalindromeOptions
from spkv_nas.contrib.reproduce.scaling.command import scaling
from spkv_nas.stages.command_group import CommandGroup, runner

_COMMANDS = (runner(PalindromeOptions), runner(AblateOptions), scaling, ladder)
REPRODUCE = CommandGroup("reproduce", "Reproduce the paper's experiments.", _COMMANDS)
