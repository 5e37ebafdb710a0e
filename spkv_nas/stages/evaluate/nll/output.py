"""Print held-out NLL for people, and return it as a document."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from spkv_nas.base.console import out, print_path
from spkv_nas.stages.evaluate.cells import evaluation_document
from spkv_nas.stages.evaluate.nll.stage import NLLResult, Pair
from spkv_nas.stages.printing import about_errors, about_selection, change


def show(result: NLLResult) -> None:
    """Print the NLL, and the difference to another checkpoint if there is one."""
    measured, nll = result.evaluation, result.evaluation.nll
    density = (
        f", density {100 * measured.density:.1f} % at tau {measured.tau:g}" if measured.density is not None else ""
    )
    text = (
        f"{nll.num_tokens.sum():,} tokens in {nll.num_documents} documents "
        f"(effective number {nll.effective_documents:.1f})"
    )
    out.print(f"[bold]{escape(result.name)}[/bold]: NLL {nll.mean:.4f}{density}; {text}")
    about_selection(result.num_selection, result.selected_by)
    if result.pair is not None:
        difference = change(result.pair.change.percent, result.pair.change.standard_error)
        out.print(
            f"against {escape(result.pair.against)}: NLL {result.pair.evaluation.nll.mean:.4f}; "
            f"difference {difference} %"
        )
        about_errors(nll.num_documents, nll.effective_documents)
        print_path("table", result.folder / "evaluation.csv")


def document(result: NLLResult) -> dict[str, Any]:
    """Return the NLL, and the paired comparison if there is one."""
    pair = {} if result.pair is None else {"against": _pair(result.pair), "folder": result.folder}
    return {"name": result.name, **evaluation_document(result.evaluation), **pair}


def _pair(pair: Pair) -> dict[str, Any]:
    """Return the baseline's NLL, the difference from it, and all rows of ``evaluation.csv``."""
    return {
        "model": pair.against,
        "nll": pair.evaluation.nll.mean,
        "delta_nll_percent": pair.change.percent,
        "delta_nll_standard_error": pair.change.standard_error,
        "checkpoints": pair.rows,
    }
