"""Suggest what to run next after each stage, and recommend the signal to choose heads by.

Head gates choose the heads: at a quarter of them no other score is better by more than 0.15 points of NLL
(``docs/study.md``). Densities tell which keys a cache may drop. All commands and the page take the wording from here.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from spkv_nas.artifacts.defaults import HEAD_GATE_STEPS, LEARNING_TOKENS, RECOMMENDED
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.tried_layouts import RECOMMENDED as RECOMMENDED_LAYOUT
from spkv_nas.base.assets import EMBEDDED_PREFIX
from spkv_nas.base.workspace import Workspace
from spkv_nas.probing.signals import SIGNALS
from spkv_nas.proposal.constraints import CONSTRAINED, ROBUST
from spkv_nas.proposal.strategies import DENSEST
from spkv_nas.proposal.windows import WINDOW_PER_HEAD
from spkv_nas.stages import lookup, record, subject
from spkv_nas.stages.commands import Suggestion
from spkv_nas.stages.options import init, score, verdict
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.options.train_hybrid import TrainHybridOptions

RECOMMENDATION = (
    f"{RECOMMENDED.replace('-', ' ')} are recommended for choosing the heads: "
    "they beat densities or tied on models of "
    "2.3 M parameters, and are level with them on one of 30 M (docs/study.md)"
)


def recommend(
    workspace: Workspace, table: HeadScores, budget: str | None = None
) -> Suggestion | None:
    """Recommend head gates where densities choose the heads, and their layout is not among the table's.

    The command proposes by the same model's head gates if the workspace has them, else it measures them for ``budget``,
    as the user gave it. Without a record of the probe's text the command is empty, and the reason says so.
    """
    identity = table.record.model_name
    if not table.is_density or identity is None:
        return None
    # Propose by measured head gates of the same window and sink tokens
    existing = _recommended_probe(workspace, identity, table)
    if existing is not None:
        if (workspace.layout_dir(table.name) / f"{RECOMMENDED}.yaml").is_file():
            return None
        proposing = ProposeOptions(probe=existing, budget=budget, workspace=workspace.root)
        return Suggestion.of(proposing, RECOMMENDATION)
    # Measure head gates
    options = record.read_options(table.record, workspace.root)
    if options is None:
        missing = (
            f"probe.yaml of '{table.name}' does not record its model and text, "
            "so no command can be suggested"
        )
        remedy = "probe the model again with --model and --data"
        return Suggestion("", f"{RECOMMENDATION}; {missing}: {remedy}")
    # A probe of another window or other sink tokens cannot be compared
    if _recommended_probe(workspace, identity) is not None:
        options = replace(options, window=table.window, sinks=str(table.sinks))
    # Keep the model and its blocks, but no option of the densities' signal
    unset: dict[str, Any] = dict.fromkeys(SIGNALS.shared_options())
    unset.pop("seed", None)
    options = replace(options, **unset)
    name = options.name and f"{options.name}-{RECOMMENDED}"
    options = replace(options, signal=RECOMMENDED, name=name, budget=budget)
    cost = f"{HEAD_GATE_STEPS} steps of {LEARNING_TOKENS:,} tokens"
    return Suggestion.of(options, f"{RECOMMENDATION}; measuring them takes {cost}")


def after_init(options: init.InitOptions, name: str, window: int) -> list[Suggestion]:
    """Suggest to retrain the model's layouts of the recipe's ``window``, if any, else to measure its head gates."""
    # Look for layouts of the same model and window
    workspace = options.folders
    model = record.absolute(options.model)
    for probe, content in record.probe_records(workspace).items():
        is_of_model = content.model_name in (model, name)
        is_recommended = content.signal == RECOMMENDED and content.window == window
        if is_of_model and is_recommended and workspace.has_layouts(probe):
            retrain = TrainHybridOptions(recipe=options.out, probe=probe, workspace=workspace.root)
            return [Suggestion.of(retrain)]
    # Measure the head gates first
    measured = ProbeOptions(recipe=options.out, signal=RECOMMENDED, workspace=workspace.root)
    return [Suggestion.of(measured, RECOMMENDATION)]


def after_probe(options: ProbeOptions, table: HeadScores) -> list[Suggestion]:
    """Suggest to propose layouts, by the recommended signal if the workspace has it."""
    workspace = options.folders
    identity = table.record.model_name
    chosen = table.name
    if table.is_density and identity is not None:
        chosen = _recommended_probe(workspace, identity, table) or chosen
    proposing = ProposeOptions(probe=chosen, budget=options.budget, workspace=workspace.root)
    return [Suggestion.of(proposing)]


def after_propose(
    options: ProposeOptions, table: HeadScores, recommended_layout: str | None
) -> list[Suggestion]:
    """Suggest what to do with layouts: decide about the recommended one, retrain them by their recipe, or score them.

    For densities, head gates are suggested first, where they are better.
    """
    workspace = options.folders
    recommended = recommend(workspace, table, options.budget)
    if recommended is not None:
        return [recommended]
    recorded = record.read_options(table.record, workspace.root)
    if recorded is None:
        return []
    # Retrain if the recipe is known, else score on the probe's text
    retrain = retraining(workspace, table)
    if retrain is not None:
        return [Suggestion.of(retrain)]
    # Decide about a layout by costs of windows, whose probe left documents unseen
    layout = _proposed(options, table, recommended_layout)
    has_unseen = table.window_costs is not None and recorded.max_tokens is None
    if has_unseen and recorded.model is not None and layout.is_file():
        judged = verdict.VerdictOptions(
            candidates=[str(layout)],
            model=recorded.model,
            data=recorded.data,
            context=recorded.context,
            documents=recorded.documents,
            dtype=recorded.dtype,
            workspace=workspace.root,
        )
        purpose = "decide whether it loses less than 1 % of NLL, on text not used for selection"
        return [Suggestion.of(judged, purpose)]
    scored = score.ScoreOptions(
        model=recorded.model,
        data=recorded.data,
        context=recorded.context,
        documents=recorded.documents,
        dtype=recorded.dtype,
        max_tokens=recorded.max_tokens,
        probe=table.name,
        workspace=workspace.root,
    )
    fairer = "other text is fairer, as this one selected the heads"
    return [Suggestion.of(scored, f"compare the NLL of the layouts before any training; {fairer}")]


def _proposed(options: ProposeOptions, table: HeadScores, recommended_layout: str | None) -> Path:
    """Return the file of the layout that was asked for: of a number of heads or a window, else the recommended one."""
    folder = options.folders.layout_dir(table.name)
    if options.budget is None and options.window is None:
        name = WINDOW_PER_HEAD if recommended_layout is None else RECOMMENDED_LAYOUT
        return folder / f"{name}.yaml"
    for name in (CONSTRAINED, ROBUST):
        file = folder / f"{name}.yaml"
        if file.is_file():
            return file
    return folder / f"{DENSEST.name}.yaml"


def after_score(options: score.ScoreOptions, result: subject.NLLTable) -> list[Suggestion]:
    """Suggest a recipe to retrain the layouts of a probe; nothing if the scores make no sense."""
    if options.probe is None or result.alarm is not None:
        return []
    table = lookup.find_table(options.folders, options.probe)
    recorded = record.read_options(table.record, options.workspace)
    if recorded is None or not recorded.data or recorded.model is None:
        return []
    return [Suggestion.of(record.first_recipe(recorded), "write a recipe to retrain the layouts")]


def retraining(workspace: Workspace, table: HeadScores) -> TrainHybridOptions | None:
    """Return the options to retrain a probe's layouts; None where its record names no recipe."""
    recorded = record.read_options(table.record, workspace.root)
    if recorded is None:
        return None
    is_embedded = recorded.model is None or recorded.model.startswith(EMBEDDED_PREFIX)
    if recorded.recipe is None and not is_embedded:
        return None
    return TrainHybridOptions(recipe=recorded.recipe, probe=table.name, workspace=workspace.root)


def _recommended_probe(
    workspace: Workspace, identity: str, like: HeadScores | None = None
) -> str | None:
    """Return the name of a model's first probe by head gates, of a table's window and sinks if any; None without."""
    for name, content in record.probe_records(workspace).items():
        if not record.is_of(content, identity, RECOMMENDED):
            continue
        if like is None or record.is_comparable(content, like):
            return name
    return None
