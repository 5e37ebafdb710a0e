"""Declare the options of the ``verdict`` command, and check them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.artifacts.defaults import LONGPPL_SHORT
from spkv_nas.base.flag import Flag, default
from spkv_nas.base.limits import MAX_REPEATS
from spkv_nas.stages import flags
from spkv_nas.stages.options import DENSE, SubjectOptions
from spkv_nas.stages.options.evaluate.agreement import NewTokens
from spkv_nas.stages.verdict.budget_options import BudgetOptions

QUESTIONS = 2000  # default maximum number of RULER's questions

Candidates = Annotated[
    list[str] | None, Flag("Checkpoints, and layout files (YAML).", metavar="CANDIDATE", argument=True)
]
Dense = Annotated[
    str, Flag("Checkpoint to keep up with; layouts are tried on its weights.", ("--against",), "CHECKPOINT")
]
Margin = Annotated[
    str,
    Flag(
        "Largest loss allowed, by criterion, such as nll=1%,ruler=2. nll: rise of the NLL in percent; longppl: rise of "
        "the NLL of key tokens, which need a long context. In percentage points: agreement: share of greedy tokens "
        "that differ from the dense model's; acceptance: share of sampled tokens that speculative sampling rejects; "
        "ruler, tasks: drop of the share of correct answers.",
        metavar="NAME=LOSS,...",
    ),
]
Risk = Annotated[str, Flag("Largest probability of a wrong pass, and of a wrong failure, such as 5%.", metavar="N%")]
MaxQuestions = Annotated[
    int | None, Flag("Maximum number of RULER's questions, over all tasks and lengths.", low=1, high=MAX_REPEATS)
]
LMTasks = Annotated[
    str | None,
    Flag("Comma-separated lm-eval tasks, such as stdlib_completions, which is built in.", ("--lm-tasks",), "NAMES"),
]


@dataclass(frozen=True, kw_only=True)
class VerdictOptions(BudgetOptions, SubjectOptions):
    """Options of the ``verdict`` command."""

    candidates: Candidates = default(note="Not with --budgets.")
    model: Dense = DENSE
    margin: Margin = "nll=1%"
    risk: Risk = "5%"
    max_tokens: flags.OptionalMaxTokens = default(None, "one block per document, at least 128 blocks")
    short_context: flags.ShortContext = default(None, f"{LONGPPL_SHORT:,}, at most 1/4 of a block", note="For longppl.")
    new_tokens: NewTokens = default(None, "half a block", note="For agreement and acceptance.")
    lengths: flags.OptionalLengths = default(None, "none; required by ruler")
    tasks: flags.RulerTasks = default(None, "all")
    questions: MaxQuestions = default(None, str(QUESTIONS))
    haystack: flags.Haystack = default(None, "RULER's noise")
    qa: flags.Questions = default(None, "none; qa_1 and qa_2 are left out")
    lm_tasks: LMTasks = default(None, "none; required by tasks")
    data_sets: flags.DataSets = default(None, "the Hub or its cache")
    include: flags.Include = None
    allow_code: flags.AllowCode = False
    seed: flags.Seed = 0
