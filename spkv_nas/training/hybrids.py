"""Hybrid training: retrain every layout from the dense checkpoint and compare their held-out NLL.

As in the SP-KV paper's architecture search, all branches see the same data in the same order. Retraining a finished
model at a high learning rate can harm it, and the control with it, so that layouts look good next to it although they
lost much: changes are measured against the unchanged dense model. A difference within its standard error, or on few
documents, is no evidence of harm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from spkv_nas.artifacts import comparison, proposal, result_tables
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import TrainedModel, write_checkpoints
from spkv_nas.base import distributed, progress, records, replace, version
from spkv_nas.base.comparison import ComparedByValue
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation import paired, ranking
from spkv_nas.evaluation.alarms import Circumstances, alarm, control_alarm, packing_warning
from spkv_nas.evaluation.zero_shot import cache_folder, zero_shot
from spkv_nas.proposal.coverage import coverage
from spkv_nas.training import corpus, first_recipe
from spkv_nas.training.branches import Branch, BranchContext
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant

MAX_HARM = 0.1  # percent of NLL
_LOWER_RATE = 3.0  # factor by which to reduce a harmful learning rate


@dataclass(frozen=True, eq=False)
class Comparison(ComparedByValue):
    """Results of the branches trained so far."""

    # table with columns spkv_nas.artifacts.comparison.COLUMNS and one row each for the unchanged dense model, full
    # attention, SP-KV, and every layout
    rows: pd.DataFrame
    models: tuple[TrainedModel, ...]  # checkpoints of the trained models, for every seed
    folder: Path  # folder of the report
    documents: Mapping[str, paired.DocumentNLL]  # held-out NLL by document, by strategy
    alarm: str | None = None  # sentence if the numbers make no sense (evaluation.alarms)

    @property
    def heldout(self) -> paired.DocumentNLL:
        """Return the held-out NLL by document of the unchanged dense model."""
        return self.documents[comparison.DENSE]

    @property
    def correlations(self) -> dict[str, dict[str, Any] | None]:
        """Return the rank correlations of coverage (-1 is best) and zero-shot NLL (+1) with ΔNLL after retraining."""
        layouts = self.rows[self.rows["num_global"].notna()]
        return {
            predictor: ranking.rank_correlation(layouts[column], layouts["delta_nll_percent"])
            for predictor, column in (
                ("coverage", "coverage_percent"),
                ("zero-shot NLL", "zero_shot_delta_percent"),
            )
        }


def train_by_recipe(
    recipe: Recipe,
    layouts: dict[str, Layout],
    table: HeadScores,
    workspace: Workspace,
    *,
    base: Path,
    num_seeds: int = 1,
    reference: bool = True,
    device: str | None = None,
    reporter: progress.Reporter = progress.SILENT,
) -> Comparison:
    """Train full attention, SP-KV and every layout by a recipe, and write the report after each run.

    ``table``, the head scores for coverage, gives the report its name. The recipe's relative paths start from ``base``.
    Other arguments are those of ``compare``. Raises ``UserError``: a layout does not fit the scores, or has the name of
    a baseline.
    """
    # Check everything that can fail before training starts; coverage fails if a layout does not fit
    corpus.join_processes(recipe, device)
    workspace.check_writable()
    covered = {name: coverage(table, layout) for name, layout in layouts.items()}
    comparison.check_layout_names(layouts)
    # Prepare the text and the dense model
    context = BranchContext.prepare(
        recipe, base, workspace.run_dir(recipe.name), device=device, reporter=reporter
    )
    trained = {name: layouts[name] for name in proposal.distinct(layouts)}

    def write(compared: Comparison) -> None:
        distributed.on_main(partial(_write, workspace, compared, context, table, trained))

    folder = workspace.report_dir(table.name)
    return compare(
        context,
        layouts,
        covered,
        folder,
        num_seeds=num_seeds,
        reference=reference,
        finished_run=write,
    )


def compare(
    context: BranchContext,
    layouts: dict[str, Layout],
    covered: dict[str, float],
    folder: Path,
    *,
    num_seeds: int = 1,
    reference: bool = True,
    finished_run: Callable[[Comparison], None] = lambda _: None,
) -> Comparison:
    """Train full attention, SP-KV and every layout from one dense checkpoint, and compare them.

    The control, full attention, is trained first; the reporter announces how much retraining changed its NLL, and every
    layout that retraining made worse. Finished runs are reused. Equal layouts are trained once, under the first name.
    Every one of ``num_seeds`` repetitions has its own data order and initial predictors; ``finished_run`` is called
    with the comparison so far after each run. ``covered`` is the coverage by layout, ``folder`` that of the report.
    Raises ``UserError`` if a layout does not fit the model, or has the name of a baseline.
    """
    # Measure layouts without training
    recipe = context.recipe
    reporter = context.reporter
    names = _distinct(layouts, reporter)
    layouts = {name: layouts[name] for name in names}
    variants = hybrid_variants(layouts, reference=reference)
    untrained, circumstances, sentence = zero_shot_scores(context, layouts)
    # Find what is finished
    runs = [
        (name, seed) for seed in range(recipe.seed, recipe.seed + num_seeds) for name in variants
    ]
    finished_runs = {
        (name, seed) for name, seed in runs if context.is_trained(variants[name], seed)
    }
    reporter.reused(len(finished_runs), len(runs), "runs")
    finished: dict[str, list[Branch]] = {name: [] for name in variants}
    models: list[TrainedModel] = []
    for number, (name, seed) in enumerate(runs, 1):
        # Train or read the run
        if (name, seed) not in finished_runs:
            reporter.announce(f"{name}, seed {seed} ({number} of {len(runs)})")
        branch = context.train(variants[name], seed)
        finished[name].append(branch)
        _report_change(name, branch.nll, untrained, recipe, reporter)
        layout = variants[name].layout
        layout_hash = "" if layout is None else layout.hash
        models.append(TrainedModel(name, seed, layout_hash, branch.checkpoint))
        # Compare what is finished
        rows = comparison_rows(finished, variants, covered, untrained, recipe, names)
        documents = _mean_documents(finished, untrained[comparison.DENSE])
        # Check the gain of the control, unless the recipe trains the model itself
        if not sentence and recipe.dense is None:
            sentence = control_alarm(
                circumstances, documents[comparison.FULL_ATTENTION], documents[comparison.DENSE]
            )
        compared = Comparison(rows, tuple(models), folder, documents, sentence)
        finished_run(compared)
    return compared


def _distinct(
    layouts: dict[str, Layout], reporter: progress.Reporter
) -> dict[str, tuple[str, ...]]:
    """Group the names of equal layouts by the first of them, and announce the duplicates."""
    names = proposal.distinct(layouts)
    for first, *duplicates in names.values():
        if duplicates:
            reporter.announce(
                f"{', '.join(duplicates)}: same layout as {first}, trained and counted once"
            )
    return names


def hybrid_variants(layouts: dict[str, Layout], *, reference: bool = True) -> dict[str, Variant]:
    """Return the variants to train, by name: full attention, SP-KV if ``reference``, and the layouts.

    Raises ``UserError``: a layout has the name of one of the baselines.
    """
    comparison.check_layout_names(layouts)
    baselines = [Variant.full_attention(), *([Variant.sp_kv()] if reference else [])]
    hybrids = {name: Variant.hybrid(layout) for name, layout in layouts.items()}
    return {variant.name: variant for variant in baselines} | hybrids


def zero_shot_scores(
    context: BranchContext, layouts: dict[str, Layout]
) -> tuple[dict[str, paired.DocumentNLL], Circumstances, str | None]:
    """Measure the held-out NLL of the unchanged dense checkpoint and of each layout applied to it without training.

    Must be called on all ranks. Warns if the numbers make no sense, before hours of training.

    Returns:
        (NLL by layout, and of ``DENSE``; the circumstances of the measurement; the warning or None).
    """
    # Score the dense model, and every layout on its weights
    model = context.load_dense()
    heldout = context.corpus.heldout
    scores = zero_shot(
        model,
        [None, *layouts.values()],
        heldout,
        batch_size=context.recipe.evaluation.batch_size,
        cache=distributed.on_main(
            partial(cache_folder, context.runs / "zero-shot", model, context.dense, heldout)
        ),
        reporter=context.reporter,
    )
    dense = scores[0]
    by_layout = dict(zip(layouts, scores[1:], strict=True))
    # Warn about numbers that make no sense
    circumstances = Circumstances.of(model, heldout, dense, context.corpus.separator)
    sentence = alarm(circumstances, dense, by_layout, layouts)
    warnings = (
        sentence and f"warning: {sentence}",
        packing_warning(context.corpus.separator, heldout),
    )
    for warning in filter(None, warnings):
        context.reporter.caution(warning)
    return {comparison.DENSE: dense, **by_layout}, circumstances, sentence


def comparison_rows(
    finished: dict[str, list[Branch]],
    variants: dict[str, Variant],
    covered: dict[str, float],
    untrained: dict[str, paired.DocumentNLL],
    recipe: Recipe,
    names: Mapping[str, Sequence[str]],
) -> pd.DataFrame:
    """Tabulate the branches finished so far, below a row for the unchanged dense model.

    ``finished`` has the branches by variant, one per seed; full attention has at least one. ``untrained`` is the
    zero-shot NLL by layout; that of ``DENSE`` is the baseline of all changes. ``names`` are all names of each layout,
    by the first.
    """
    # Unchanged dense model
    dense = untrained[comparison.DENSE]
    controls = finished[comparison.FULL_ATTENTION]
    rows: list[dict[str, object]] = [
        {
            "strategy": comparison.DENSE,
            "density_percent": 100.0,
            "coverage_percent": 100.0,
            **_nll_columns(dense, dense, _mean([branch.nll for branch in controls])),
            "num_seeds": 0,
            "steps": 0,
            "zero_shot_nll": dense.mean,
            "note": "",
        }
    ]
    # One row per variant, with the mean over seeds
    for name, branches in finished.items():
        if not branches:
            continue
        variant = variants[name]
        count = len(branches)
        nll = _mean([branch.nll for branch in branches])
        control = _mean([branch.nll for branch in controls[:count]])
        rows.append(
            {
                "strategy": name,
                "density_percent": 100.0 * variant.density(branches[0].density),
                "coverage_percent": 100.0 * covered.get(name, 1.0),
                **_nll_columns(nll, dense, nll if name == comparison.FULL_ATTENTION else control),
                "num_global": None if variant.layout is None else variant.layout.num_global,
                "num_seeds": count,
                "steps": recipe.branch.steps,
                **_zero_shot_columns(name, untrained),
                "note": f"also {', '.join(same)}" if (same := names.get(name, ())[1:]) else "",
            }
        )
    return pd.DataFrame(rows, columns=list(comparison.COLUMNS))


def _mean_documents(
    finished: Mapping[str, Sequence[Branch]], dense: paired.DocumentNLL
) -> dict[str, paired.DocumentNLL]:
    """Return the held-out NLL by document, as the mean over seeds, of the dense model and of the finished branches."""
    documents = {comparison.DENSE: dense}
    for name, branches in finished.items():
        if branches:
            documents[name] = _mean([branch.nll for branch in branches])
    return documents


def _nll_columns(
    nll: paired.DocumentNLL, dense: paired.DocumentNLL, control: paired.DocumentNLL
) -> dict[str, float]:
    """Return NLL and its changes from the unchanged dense model and from the control; NaN against itself."""
    columns = {"nll": nll.mean}
    for baseline, column in ((dense, "delta_nll"), (control, "delta_control")):
        change = (
            paired.PairedDifference(np.nan, np.nan)
            if baseline is nll
            else paired.paired_difference(nll, baseline)
        )
        columns |= {
            f"{column}_percent": change.percent,
            f"{column}_standard_error": change.standard_error,
        }
    return columns


def _zero_shot_columns(name: str, untrained: dict[str, paired.DocumentNLL]) -> dict[str, float]:
    """Return NLL without training and its change from the unchanged dense model; NaN for SP-KV."""
    dense = untrained[comparison.DENSE]
    # SP-KV has no score: it has no predictors before training
    score = dense if name == comparison.FULL_ATTENTION else untrained.get(name)
    change = (
        np.nan
        if score is None or score is dense
        else paired.paired_difference(score, dense).percent
    )
    return {
        "zero_shot_nll": np.nan if score is None else score.mean,
        "zero_shot_delta_percent": change,
    }


def _write(
    workspace: Workspace,
    compared: Comparison,
    context: BranchContext,
    table: HeadScores,
    layouts: Mapping[str, Layout],
) -> None:
    """Write ``comparison.csv``, ``comparison.yaml`` (correlations, windows, recipe, versions), ``checkpoints.csv``."""
    # Collect the content of comparison.yaml
    correlations = compared.correlations
    recipe = context.recipe
    sinks = {name: layout.sinks for name, layout in layouts.items()}
    content = {
        "probe": table.name,
        **({} if compared.alarm is None else {result_tables.ALARM: compared.alarm}),
        "separator": context.corpus.separator.as_mapping(),
        "heldout": {
            "tokens": int(compared.heldout.num_tokens.sum()),
            "documents": compared.heldout.num_documents,
            "effective_documents": round(compared.heldout.effective_documents, 1),
        },
        "windows": {
            comparison.SP_KV: recipe.gates.window,
            **{name: layout.window for name, layout in layouts.items() if not layout.windows},
        },
        **({"sinks": sinks} if any(sinks.values()) else {}),
        "rank_correlation": correlations["coverage"],
        "zero_shot_rank_correlation": correlations["zero-shot NLL"],
        "recipe": recipe.model_dump(mode="json"),
        "environment": version.environment(),
    }
    # Replace all files at once, keeping a result of other inputs beside them
    contents = [layout.content for layout in layouts.values()]
    inputs = result_tables.inputs_of({"recipe": content["recipe"], "layouts": contents})
    tables = ["comparison.csv", "checkpoints.csv", paired.DOCUMENTS_FILE]
    with replace.replacing(compared.folder) as new:
        comparison.write_comparison(new / "comparison.csv", compared.rows)
        paired.write_documents(new / paired.DOCUMENTS_FILE, compared.documents)
        write_checkpoints(new, compared.models, workspace.root)
        records.write_record(new / "comparison.yaml", {"inputs": inputs, **content})
        result_tables.keep_earlier(
            compared.folder, new, "comparison.yaml", tables, inputs, context.reporter
        )


def _mean(parts: list[paired.DocumentNLL]) -> paired.DocumentNLL:
    return paired.DocumentNLL(np.mean([part.total for part in parts], axis=0), parts[0].num_tokens)


def compare_control(
    control: paired.DocumentNLL,
    dense: paired.DocumentNLL,
    recipe: Recipe,
    reporter: progress.Reporter,
) -> None:
    """Announce how much retraining changed the held-out NLL of full attention, and warn with a remedy if it did harm.

    ``control`` is its NLL after retraining, ``dense`` that of the unchanged dense model on the same text.
    """
    # Measure the change, and judge it only on enough documents
    change = paired.paired_difference(control, dense)
    measured = (
        f"full attention retrained (the control) has {_amount(change)} NLL than the dense model as "
        "it is"
    )
    if (number := control.num_documents) < ranking.MIN_DOCUMENTS:
        reporter.announce(
            f"{measured}, on {number} documents: too few to say whether retraining harms the model"
        )
        return
    if is_worse(change, MAX_HARM):
        reporter.caution(
            f"warning: {measured}: this retraining harms the model, and layouts with it\n"
            f"{remedy(recipe)}"
        )
        return
    reporter.announce(measured)
    # Explain gains that come from the dense phase
    if recipe.dense is not None:
        reporter.announce(
            "the recipe's dense phase ends at its peak learning rate, and branches are its decay: "
            "every row gains by it, so the change against the control says what a layout costs"
        )


def _report_change(
    name: str,
    retrained: paired.DocumentNLL,
    untrained: Mapping[str, paired.DocumentNLL],
    recipe: Recipe,
    reporter: progress.Reporter,
) -> None:
    """Announce the change of the control by retraining, or warn about a layout that became worse."""
    if name == comparison.FULL_ATTENTION:
        compare_control(retrained, untrained[comparison.DENSE], recipe, reporter)
    elif name in untrained:
        caution_if_worse(name, retrained, untrained[name], reporter)


def caution_if_worse(
    name: str,
    retrained: paired.DocumentNLL,
    untrained: paired.DocumentNLL,
    reporter: progress.Reporter,
) -> None:
    """Warn about a layout whose held-out NLL is higher after retraining than without training."""
    change = paired.paired_difference(retrained, untrained)
    if is_worse(change) and retrained.num_documents >= ranking.MIN_DOCUMENTS:
        reporter.caution(
            f"warning: {name} has {_amount(change)} NLL retrained than before it was retrained"
        )


def is_worse(change: paired.PairedDifference, most: float = 0.0) -> bool:
    """Return True if a change is an increase of more than ``most`` percent and more than its standard error."""
    return change.percent > most and change.percent > change.standard_error


def remedy(recipe: Recipe) -> str:
    """Return advice on the recipe: a lower learning rate, and a longer warm-up if it is below ``WARMUP_SHARE``."""
    branch = recipe.branch
    lower = branch.learning_rate / _LOWER_RATE
    warmup = max(1, round(first_recipe.WARMUP_SHARE * branch.steps))
    keys = f"branch.learning_rate: {lower:.1g} (now {branch.learning_rate:g})"
    if branch.warmup_steps < warmup < branch.steps:
        keys += f" and branch.warmup_steps: {warmup} (now {branch.warmup_steps})"
    return f"try {keys}"


def _amount(change: paired.PairedDifference) -> str:
    """Format a change, such as "0.42 ± 0.08 % less"."""
    return (
        f"{abs(change.percent):.2f} ± {change.standard_error:.2f} % "
        f"{'more' if change.percent > 0 else 'less'}"
    )
