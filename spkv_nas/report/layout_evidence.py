"""Say in sentences what a workspace has measured of a layout, for the model card of its export."""

import math
import os
from collections.abc import Iterator

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.result_tables import ALARM, CRITICAL_BUDGET, SCORES, VERDICT
from spkv_nas.base.workspace import Workspace
from spkv_nas.report.formatting import change, signed, without_folder
from spkv_nas.report.inputs import ResultFile, result_files

_ANSWERS = {"passes": "passes", "fails": "fails", "open": "is undecided at"}


def layout_evidence(workspace: Workspace, checkpoint: str, layout: Layout) -> list[str]:
    """Return sentences on the verdicts and scores of a layout with the weights of a checkpoint; empty without any.

    Results whose numbers make no sense (``evaluation.alarms``) are left out. Raises ``UserError`` if a result cannot be
    read.
    """
    sentences: list[str] = []
    for kind, describe in ((CRITICAL_BUDGET, _of_verdict), (VERDICT, _of_verdict), (SCORES, _of_scores)):
        for file in result_files(workspace, kind):
            if not file.record.get(ALARM):
                sentences += describe(file, checkpoint, layout)
    return sentences


def _of_verdict(file: ResultFile, checkpoint: str, layout: Layout) -> Iterator[str]:
    """Yield a sentence for each criterion of a verdict on the layout."""
    record = file.record
    for name, recorded in record.get("layouts", {}).items():
        judged = file.layout(name, recorded["heads"])
        is_same = judged is not None and judged.content_hash == layout.content_hash
        if not is_same or not _is_same_path(record.get("candidates", {}).get(name), checkpoint):
            continue
        for row in file.rows[file.rows["candidate"] == name].itertuples():
            samples = f"{row.num_samples:,} {record.get('nouns', {}).get(row.criterion, 'samples')}"
            is_known = not (math.isnan(row.low) and math.isnan(row.high))
            interval = f"interval {signed(row.low, 2)} to {signed(row.high, 2)}" if is_known else "no interval yet"
            yield (
                f"{row.criterion}: a loss of {signed(row.loss, 2)} {row.unit} ({interval}) against "
                f"`{without_folder(str(record.get('against')))}` on {samples}{_text(file)}; it "
                f"{_ANSWERS[row.answer]} the margin of {row.margin:g} {row.unit} at a risk of "
                f"{100 * record.get('risk', 0):g} %."
            )


def _of_scores(file: ResultFile, checkpoint: str, layout: Layout) -> Iterator[str]:
    """Yield a sentence on the layout's NLL with the weights as they are."""
    record = file.record
    if not _is_same_path(record.get("model"), checkpoint):
        return
    favoured = ", some of which the layout was selected on" if record.get("num_selection") else ""
    for row in file.rows[file.rows["hash"] == layout.hash].itertuples():
        yield (
            f"NLL: {change(row.delta_nll_percent, row.delta_nll_standard_error)} % against full attention with the "
            f"same weights (standard error), {row.nll:.4f} nats per token, on {record.get('num_documents', 0):,} "
            f"documents{_text(file)} in blocks of {record.get('block_size', 0):,} tokens{favoured}."
        )


def _text(file: ResultFile) -> str:
    """Return the text of a result in words, without the folders of this machine; "" if none was read."""
    data = file.record.get("data")
    if isinstance(data, list):
        return f" of {', '.join(f'`{without_folder(str(source))}`' for source in data)}"
    return "" if data is None else f" of the {data}" if isinstance(data, str) else " of held-out text of its recipe"


def _is_same_path(recorded: object, checkpoint: str) -> bool:
    """Return whether a recorded checkpoint is the given one: the same id, or the same path."""
    first, second = (os.path.abspath(os.path.expanduser(str(each))) for each in (recorded, checkpoint))
    return first == second
