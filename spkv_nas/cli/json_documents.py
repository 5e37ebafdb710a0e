"""Results for programs: what ``--json`` prints of them, the numbers of the tables in ``show`` and where the files are.

A table is a list of rows with the columns of its CSV file. ``result.plain`` makes JSON of what these functions return,
and of the results that need none, whose fields are what is to be known of them.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spkv_nas.artifacts.head_scores import HeadScores
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.stages.cost import CalibrationResult, CostResult
    from spkv_nas.stages.evaluate import EvaluationResult, Pair
    from spkv_nas.stages.forecast import Forecast
    from spkv_nas.stages.init import FirstRecipe
    from spkv_nas.stages.layout import ComparedLayouts, ShownLayout
    from spkv_nas.stages.propose import BudgetsResult, ProposalResult
    from spkv_nas.stages.search import SearchResult
    from spkv_nas.training.hybrids import Comparison
    from spkv_nas.training.run_plan import Plan

Document = dict[str, Any]


def probe(table: HeadScores, folder: Path) -> Document:
    """A probe, written to ``folder``: its mean over heads, and every head."""
    return {
        **_about(table),
        "mean": table.mean,
        "standard_deviation": table.std,
        "diagnosis": table.diagnosis(),
        "heads": table.rows,
        "folder": folder,
    }


def proposal(result: ProposalResult) -> Document:
    """Layouts by coverage, and what else was asked."""
    answer = result.answer
    return {
        **_about(answer.table),
        "layouts": answer.rows,
        "certainty": None if answer.certainty is None else answer.certainty.intervals,
        "sentences": result.sentences,
        "advice": result.advice,
        "trust": result.trust,
        "folder": result.folder,
    }


def budgets(result: BudgetsResult) -> Document:
    """A budget curve, whole, with its knee."""
    curve = result.curve
    return {
        **_about(curve.table),
        "budgets": curve.rows,
        "knee": curve.knee,
        "caution": result.caution,
        "folder": result.folder,
        "figure": result.figure,
    }


def comparison(result: Comparison) -> Document:
    """Retrained layouts, how well cheaper measures order them, and where their checkpoints are."""
    return {
        "layouts": result.rows,
        "num_documents": result.heldout.num_documents,
        "effective_documents": result.heldout.effective_documents,
        "rank_correlation": result.correlations,
        "checkpoints": result.models,
        "folder": result.folder,
    }


def evaluation(result: EvaluationResult) -> Document:
    """Return held-out NLL, or a sweep of thresholds with the folder that it was written to."""
    found = result.evaluation
    return {
        "name": result.name,
        "nll": found.nll.mean,
        "tau": found.tau,
        "density": found.density,
        "num_tokens": found.nll.num_tokens.sum(),
        "num_documents": found.nll.num_documents,
        "effective_documents": found.nll.effective_documents,
        **({} if result.pair is None else {"against": _pair(result.pair), "folder": result.folder}),
        **({} if result.sweep is None else {"sweep": result.sweep, "folder": result.folder}),
    }


def _pair(pair: Pair) -> Document:
    """The other checkpoint, the change of NLL from its, and all rows of ``evaluation.csv``."""
    return {
        "model": pair.against,
        "nll": pair.evaluation.nll.mean,
        "delta_nll_percent": pair.change.percent,
        "delta_nll_standard_error": pair.change.standard_error,
        "checkpoints": pair.rows,
    }


def search(result: SearchResult) -> Document:
    """All layouts of a search, what each sampler reached, and how well cheap measures order the layouts."""
    from spkv_nas.base.statistics import effective_number
    from spkv_nas.evaluation.guidance import correlations, guidance

    return {
        "layouts": result.rows,
        "num_documents": int((result.judged_on > 0).sum()),
        "effective_documents": effective_number(result.judged_on),
        "cost": result.cost_name,
        "guidance": {sampler: reached.as_mapping() for sampler, reached in guidance(result.rows).items()},
        "rank_correlation": correlations(result.rows),
        "folder": result.folder,
    }


def forecast(result: Forecast) -> Document:
    """What every stage takes."""
    return {
        **{one.name: getattr(result, one.name) for one in fields(result)},
        "stages": [
            {
                **{one.name: getattr(stage, one.name) for one in fields(stage)},
                "bytes": stage.memory.total,
                "fits": stage.fits,
            }
            for stage in result.stages
        ],
    }


def plan(result: Plan) -> Document:
    """What would be trained."""
    return {
        **{one.name: getattr(result, one.name) for one in fields(result)},
        "seconds": result.seconds,
        "fits": result.fits,
    }


def first_recipe(result: FirstRecipe) -> Document:
    """What a recipe leads to, and where it is."""
    return {"recipe": result.file, "plan": plan(result.plan)}


def report(page: Path) -> Document:
    """Where the page is."""
    return {"report": page}


def layouts(shown: list[ShownLayout]) -> Document:
    """Grids and their coverage."""
    return {
        "layouts": [{"file": one.file, **_layout(one.layout), "coverage": one.coverage} for one in shown],
    }


def difference(compared: ComparedLayouts) -> Document:
    """How two layouts differ."""
    return {
        "same": compared.same,
        "layouts": [_layout(compared.one), _layout(compared.other)],
        "num_heads": compared.difference.num_heads,
        "jaccard": compared.difference.jaccard,
        "marks": compared.difference.marks,
    }


def cost(result: CostResult) -> Document:
    """KV bytes, FLOPs and times of full attention, of layouts and of a density."""
    return {
        "name": result.name,
        "shape": result.shape,
        "context": result.context,
        "costs": result.costs,
        "times": result.times.source,
        "figure": result.figure,
    }


def calibration(result: CalibrationResult) -> Document:
    """Times by number of global heads."""
    found = result.calibration
    return {
        "name": result.name,
        "case": found.case,
        "source": found.source,
        "times": found.timings,
        "is_disturbed": found.is_disturbed,
        "folder": result.folder,
    }


def _about(table: HeadScores) -> Document:
    return {
        "name": table.name,
        "signal": table.signal,
        "tau": table.tau if table.is_density else None,
        "num_layers": table.num_layers,
        "num_kv_heads": table.num_kv_heads,
    }


def _layout(layout: Layout) -> Document:
    return {
        "heads": layout.heads,
        "num_global": layout.num_global,
        "num_heads": layout.num_heads,
        "window": layout.window,
        "strategy": layout.strategy,
        "hash": layout.hash,
    }
