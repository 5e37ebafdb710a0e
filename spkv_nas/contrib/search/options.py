"""Declare the options of the ``search`` command, whose docstring is the help, and make its specification from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from spkv_nas.base import errors, flag, progress
from spkv_nas.contrib.search.sampler import SAMPLERS, ThompsonSampling
from spkv_nas.proposal.budget import PAPER_BUDGET, parse_budget
from spkv_nas.stages import commands, flags
from spkv_nas.stages.options import EMBEDDED_RECIPE, LayerOptions, RetrainsLayouts

if TYPE_CHECKING:  # pandas takes too long for --help
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.contrib.search.space import Space
    from spkv_nas.training.recipe import Recipe

_ONE_BUDGET = "search has one budget: start it again for another, or see critical-budget"
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


@dataclass(frozen=True, kw_only=True)
class SearchOptions(LayerOptions, RetrainsLayouts):
    """Search for better layouts than the strategies'. Writes reports/NAME/search.csv and layouts/NAME/search/.

    Many layouts are scored without training on held-out text (--max-tokens, at most half of it). The best is then
    compared with the best of the strategies' on the documents that selected nothing. After an interruption the same
    command resumes: finished scores are kept. train-hybrid retrains what it finds.
    """

    layouts: flags.OptionalLayoutFiles = flag.default(
        note="Scored, too; those within budget, window and constraints are also started from."
    )
    recipe: flags.RecipeOption = flag.default(
        None, EMBEDDED_RECIPE, note="Layouts are scored on its dense model."
    )
    budget: flags.OptionalBudget = flag.default(None, PAPER_BUDGET)
    trials: Trials = 100
    sampler: Sampler = ThompsonSampling.name
    max_tokens: flags.MaxTokens = flag.default(
        65_536, note="Held-out text for selection; at most half of it."
    )
    name: flags.Name = flag.default(None, "the probe's")
    seed: flags.Seed = 0


@dataclass(frozen=True)
class SearchSpecification:
    """Validated specification of a search, made without training."""

    space: "Space"
    file: Path  # of the recipe
    recipe: "Recipe"  # whose dense model layouts are scored on
    name: str  # of the results
    # What the search starts from, by name: the strategies' and the given layouts in the space
    starts: "dict[str, Layout]"
    given: "dict[str, Layout]"  # that the user gave, by name

    @property
    def layouts(self) -> "dict[str, Layout]":
        """Return the layouts to score besides those that the sampler draws, by name."""
        return {**self.starts, **self.given}


def specify(
    options: SearchOptions, reporter: progress.Reporter = progress.SILENT
) -> SearchSpecification:
    """Make a search's specification from its options. Raises ``UserError`` if they are invalid."""
    from spkv_nas.artifacts.proposal import Proposal, distinct
    from spkv_nas.contrib.search.space import Space, starting_layouts
    from spkv_nas.stages import engines, lookup
    from spkv_nas.training.recipe import Recipe

    # Read the table and the recipe
    table = lookup.chosen_table(options, reporter)
    file = lookup.chosen_recipe(options, table, "search.yaml")
    recipe = Recipe.read(file)
    SAMPLERS[options.sampler]  # raises for an unknown one
    # Define the search space
    window = table.window or recipe.gates.window
    budget = parse_budget(options.budget, table.num_candidates)
    constraints = engines.read_constraints(options)
    space = Space(table, budget, window, constraints.on(table))
    space.check()
    # Read the layouts to start from and to compare with
    strategies = starting_layouts(space)
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


def check(options: SearchOptions) -> None:
    """Check the options by making the search's specification, and the recipe's files."""
    from spkv_nas.stages.checks import check_files

    specification = specify(options)
    check_files(specification.recipe, specification.file.parent)


SEARCH = commands.Command(
    "search",
    commands.runner(SearchOptions),
    removed=(
        ("--retrain", "search scores without training: train-hybrid retrains the layout it names"),
        ("--storage", "search is one process, whose finished scores are kept in runs/"),
        ("--objective", _ONE_BUDGET),
        ("--context", _ONE_BUDGET),
    ),
)
