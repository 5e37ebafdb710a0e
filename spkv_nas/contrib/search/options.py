"""Declare the options of the ``search`` command, whose docstring is the help, and make its specification from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from spkv_nas.base import errors, flag, progress, units
from spkv_nas.contrib.search.sampler import SAMPLERS, Effort
from spkv_nas.proposal.budget import (
    MEMORY,
    PAPER_BUDGET,
    is_several,
    parse_budget,
    parse_budgets,
    parse_memories,
)
from spkv_nas.stages import commands, flags
from spkv_nas.stages.options import LayerOptions, RetrainsLayouts

if TYPE_CHECKING:  # pandas takes too long for --help
    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.contrib.search.space import Space
    from spkv_nas.training.recipe import Recipe

Objective = Annotated[
    str,
    flag.Flag(
        "Objectives: nll; or nll,kv-bytes for the Pareto front of both.",
        metavar="NAMES",
        values=("nll", "nll,kv-bytes"),
    ),
]
Trials = Annotated[
    int, flag.Flag("Number of layouts to score without training.", low=1, high=10**6)
]
Sampler = Annotated[
    str,
    flag.Flag(
        f"Sampler of layouts: {'; '.join(f'{entry.name} ({entry.help})' for entry in SAMPLERS)}.",
        values=SAMPLERS.names,
    ),
]
Retrain = Annotated[
    int,
    flag.Flag(
        "Number of best layouts to retrain, beside the best start and the given ones: for a "
        "quarter of the recipe's steps, then in full unless behind the median; 0 retrains none, "
        "not even those.",
        low=0,
        high=10**6,
    ),
]
Storage = Annotated[str | None, flag.Flag("URL of the study's database, such as postgresql://...")]


@dataclass(frozen=True, kw_only=True)
class SearchOptions(LayerOptions, RetrainsLayouts):
    """Search for better layouts than the strategies'. Writes reports/NAME/search.csv and layouts/NAME/search/.

    Many layouts are scored without training, the best are retrained briefly, and the best of these in full. Full
    retrainings are evaluated on held-out text that was not used for selection (--max-tokens, at most half of it, is).
    With a second objective, --budget may be a range or a list. The same command, started again here or on another
    machine with the same workspace, is another worker of the same study; after an interruption it resumes.
    """

    layouts: flags.OptionalLayoutFiles = flag.default(
        note="Retrained, too; those within budget, window and constraints are also started from."
    )
    budget: flags.OptionalBudgets = flag.default(
        None,
        PAPER_BUDGET,
        note="Or memory=20%: as many heads as fit that share of full attention's KV cache.",
    )
    objective: Objective = "nll"
    trials: Trials = Effort.trials
    sampler: Sampler = Effort.sampler
    retrain: Retrain = Effort.num_retrained
    max_tokens: flags.MaxTokens = flag.default(
        65_536, note="Held-out text for selection; at most half of it."
    )
    context: flags.OptionalContext = None
    storage: Storage = flag.default(None, "SQLite in runs/NAME/search/")
    name: flags.Name = flag.default(None, "the probe's")
    seed: flags.Seed = 0


@dataclass(frozen=True)
class SearchSpecification:
    """Validated specification of a search, made without training."""

    effort: Effort  # trials, sampler, seed and retrainings
    # Tokens of the sequence whose KV bytes are the second objective; None without one
    context: int | None
    space: "Space"
    file: Path  # of the recipe
    recipe: "Recipe"  # to retrain layouts by
    name: str  # of the results
    # What the search starts from, by name: the strategies' and the given layouts in the space
    starts: "dict[str, Layout]"
    given: "dict[str, Layout]"  # that the user gave, by name


def _budgets(
    budget: str | None, table: "HeadScores", window: int, context: str | None = None
) -> list[int]:
    """Return the numbers of global heads of a budget, ascending; memory counts at a context, by default the model's."""
    from spkv_nas.proposal.requirements import Requirements

    if not str(budget).startswith(MEMORY):
        number = table.num_candidates
        if is_several(budget):
            return parse_budgets(str(budget), number)
        return [parse_budget(budget, number)]
    size = None if context is None else units.parse_context(context)
    budgets = set()
    for percent in parse_memories(str(budget)):
        requirements = Requirements(kv_bytes=f"{percent}%", context=size)
        budgets.add(requirements.limit(table, None, window).heads(table))
    return sorted(budgets)


def specify(
    options: SearchOptions, reporter: progress.Reporter = progress.SILENT
) -> SearchSpecification:
    """Make a search's specification from its options. Raises ``UserError`` if they are invalid."""
    from spkv_nas.artifacts.proposal import Proposal, distinct
    from spkv_nas.contrib.search.space import Space, starting_layouts
    from spkv_nas.stages import engines, lookup
    from spkv_nas.training.recipe import Recipe

    # Read the table, the recipe and the objective
    table = lookup.chosen_table(options, reporter)
    file = lookup.chosen_recipe(options, table, "search.yaml")
    recipe = Recipe.read(file)
    context = _parse_objective(options.objective, options.context)
    SAMPLERS[options.sampler]  # raises for an unknown one
    # Define the search space
    window = table.window or recipe.gates.window
    budgets = _budgets(options.budget, table, window, options.context)
    constraints = engines.read_constraints(options)
    space = Space(table, (budgets[0], budgets[-1]), window, constraints.on(table))
    space.check()
    # Read the layouts to start from and to compare with
    strategies = starting_layouts(space, budgets)
    given = dict(Proposal.read(options.layouts or ()).layouts)
    _check_given(space, strategies, given)
    starts = dict(strategies)
    for name, layout in given.items():
        if space.contains(layout):
            starts[name] = layout
    # Keep one name of each distinct layout
    for first, *same in distinct({**starts, **given}).values():
        for name in same:
            reporter.announce(f"{name} and {first} are the same layout, which is tried once")
            starts.pop(name, None)
            given.pop(name, None)
    return SearchSpecification(
        effort=Effort(options.trials, options.sampler, options.seed, options.retrain),
        context=context,
        space=space,
        file=file,
        recipe=recipe,
        name=options.name or table.name,
        starts=starts,
        given=given,
    )


def _check_given(
    space: "Space", strategies: "Mapping[str, Layout]", given: "Mapping[str, Layout]"
) -> None:
    """Raise ``UserError`` for a duplicate or reserved name, another window, or other sink tokens."""
    from spkv_nas.artifacts.comparison import check_layout_names
    from spkv_nas.proposal.coverage import coverage

    check_layout_names(given)
    for key, layout in given.items():
        if key in strategies:
            raise errors.UserError(
                f"two layouts are called '{key}': rename one of them (key 'strategy')"
            )
        coverage(space.table, layout)  # raises for another grid
        if layout.windows or (layout.window, layout.sinks) != (space.window, space.sinks):
            reach = "several windows" if layout.windows else f"a window of {layout.window} tokens"
            raise errors.UserError(
                f"layout '{key}' has {reach} and {layout.sinks} sink tokens, the search "
                f"{space.window} and {space.sinks}, as its probe '{space.table.name}'\n"
                "use layouts of that probe, or convert them (layout convert, with --window "
                f"{space.window} --sinks {space.sinks})"
            )


def _parse_objective(objective: str, context: str | None) -> int | None:
    """Return the context of the second objective, KV bytes; None for NLL alone."""
    if objective not in ("nll", "nll,kv-bytes"):
        raise errors.UserError(
            f"--objective '{objective}' is unknown; expected nll or nll,kv-bytes"
        )
    if objective == "nll":
        return None
    if context is None:
        raise errors.UserError(
            f"--objective {objective} needs --context, the number of tokens per sequence"
        )
    return units.parse_context(context)


def check(options: SearchOptions) -> None:
    """Check the options by making the search's specification, and the recipe's files."""
    from spkv_nas.stages.checks import check_files

    specification = specify(options)
    check_files(specification.recipe, specification.file.parent)


SEARCH = commands.Command("search", commands.runner(SearchOptions))
