"""Command group ``reproduce``: the paper's experiments."""

from __future__ import annotations

from spkv_nas.contrib.reproduce.ablate.command import ablate
from spkv_nas.contrib.reproduce.ladder.command import ladder
from spkv_nas.contrib.reproduce.palindrome.command import palindrome
from spkv_nas.contrib.reproduce.scaling.command import scaling
from spkv_nas.stages.command_group import CommandGroup

REPRODUCE = CommandGroup("reproduce", "Reproduce the paper's experiments.", (palindrome, ablate, scaling, ladder))
