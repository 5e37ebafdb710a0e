"""Score layouts on a checkpoint without training, to ``reports/<name>/zero-shot.csv``."""

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from spkv_nas.artifacts import defaults, result_tables
from spkv_nas.artifacts.displacement import Displacement
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.proposal import Proposal, is_equal_memory
from spkv_nas.base import console, distributed, errors, units
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.workspace import Workspace
from spkv_nas.evaluation import alarms, nll, separators
from spkv_nas.evaluation.selected import find_selected
from spkv_nas.evaluation.zero_shot import cache_folder, cache_shares, score_table, zero_shot
from spkv_nas.proposal.coverage import coverage
from spkv_nas.stages import commands, lookup, next_steps, printing
from spkv_nas.stages.options import DENSE
from spkv_nas.stages.options.score import ScoreOptions
from spkv_nas.stages.subject import Measured, NLLTable, Subject, measured_on


def run(options: ScoreOptions, reporter: Reporter = SILENT) -> commands.Result:
    """Measure the zero-shot NLL of layouts on a checkpoint and write ``reports/<name>/zero-shot.csv``."""
    # Read table and layouts
    workspace = options.folders
    table = None if options.probe is None else lookup.find_table(workspace, options.probe)
    subject = _subject(options, table)
    family = subject.family if table is None else table.name
    name = options.name or (subject.name if table is None else table.name)
    proposal = lookup.find_proposal(workspace, options.name or family, options.layouts)
    covered = _coverages(proposal, table)
    # Score full attention and every layout
    measured = subject.load(reporter, tokens=defaults.SCORE_TOKENS)
    memory = cache_shares(measured.model, proposal.layouts, measured.blocks.block_size)
    proposal.warn_of_windows(memory=memory.values())
    _announce_size(measured, len(proposal.layouts), reporter)
    cache = _cache(workspace, family, subject, measured)
    compared: list[Displacement | None] = []
    full_attention, *scores = zero_shot(
        measured.model,
        [None, *proposal.layouts.values()],
        measured.blocks,
        batch_size=measured.batch_size,
        cache=cache,
        reporter=reporter,
        compared=compared,
    )
    displaced = dict(zip(proposal.layouts, compared[1:], strict=True))
    by_name = dict(zip(proposal.layouts, scores, strict=True))
    # Write the table
    circumstances = alarms.Circumstances.of(
        measured.model, measured.blocks, full_attention, measured.separator
    )
    found_alarm = alarms.alarm(circumstances, full_attention, by_name, proposal.layouts)
    rows = score_table(proposal.layouts, by_name, full_attention, memory, covered, displaced)
    selected = find_selected(
        workspace, proposal.layouts, near=proposal.files.values(), with_scores=False
    )
    result = NLLTable(
        name=name,
        rows=rows,
        folder=workspace.report_dir(name),
        num_documents=full_attention.num_documents,
        effective_documents=full_attention.effective_documents,
        selected_by=selected.among(measured.blocks),
        num_selection=selected.count(measured.blocks),
        alarm=found_alarm,
    )
    origin = {
        **measured_on(subject, measured, full_attention),
        "probe": None if table is None else table.name,
        **_layout_facts(proposal),
        "selected_by": list(result.selected_by),
        "num_selection": result.num_selection,
        "alarm": found_alarm,
        "inputs": cache.name[:8],
    }
    distributed.on_main(lambda: _write(result, origin, measured, reporter))
    return commands.Result(result, show, next=next_steps.after_score(options, result))


def _cache(workspace: Workspace, family: str, subject: Subject, measured: Measured) -> Path:
    """Return the folder of finished scores, which probes and searches share."""
    root = workspace.run_dir(family) / "zero-shot"
    return distributed.on_main(
        lambda: cache_folder(root, measured.model, subject.source, measured.blocks)
    )


def _subject(options: ScoreOptions, table: HeadScores | None) -> Subject:
    """Return the subject to score layouts on, which reads documents as the probe of its table did."""
    subject = Subject.of(options, DENSE, "score on")
    if table is None:
        return subject
    report = separators.SeparatorReport.parse(table.record.separator)
    if report is None:
        return subject
    documents = options.documents or report.documents
    return replace(subject, given_separator=report.best, documents=documents)


def _coverages(proposal: Proposal, table: HeadScores | None) -> dict[str, float]:
    """Return the coverage of every layout, by name, at the threshold of the proposal; empty without a table."""
    if table is None:
        return {}
    table_at_tau = proposal.table(table)
    return {name: coverage(table_at_tau, layout) for name, layout in proposal.layouts.items()}


def _layout_facts(proposal: Proposal) -> dict[str, dict[str, int]]:
    """Return the windows of layouts, and their sink tokens if any has some, for the record."""
    if not proposal.sinks:
        return {"windows": proposal.windows}
    return {"windows": proposal.windows, "sinks": proposal.sinks}


def _write(
    result: NLLTable, origin: dict[str, Any], measured: Measured, reporter: Reporter
) -> None:
    """Write the table, with the layouts that were scored earlier on the same text, and the documents of the text."""
    rows = result.rows
    earlier = None
    with suppress(errors.UserError):  # a damaged table is kept beside the new one
        earlier = result_tables.SCORES.read(result.folder)
    if earlier is not None:
        earlier_rows, earlier_origin = earlier
        if earlier_origin.get("inputs") == origin["inputs"]:
            rows = _with_earlier(rows, earlier_rows)
    result_tables.SCORES.write(result.folder, rows, origin, reporter, measured.blocks.text_ids)


def _with_earlier(rows: pd.DataFrame, earlier: pd.DataFrame) -> pd.DataFrame:
    """Return rows with the earlier ones of other layouts, below full attention by ascending NLL."""
    is_other = ~earlier["hash"].isin(rows["hash"])
    others = earlier[is_other]
    # Tell other layouts of equal names apart, as in "densest-12"
    for distinction in ("num_global", "hash"):
        has_taken_name = others["strategy"].isin(rows["strategy"]) | others["strategy"].duplicated()
        others.loc[has_taken_name, "strategy"] += "-" + others[distinction].astype(str)
    full_attention = rows.head(1)
    layouts = pd.concat([rows[1:], others]).sort_values("nll")
    return pd.concat([full_attention, layouts])


def _announce_size(measured: Measured, num_layouts: int, reporter: Reporter) -> None:
    """Announce how much of the text is measured and, after timing a block, how long that takes at most."""
    blocks = measured.blocks
    whole = measured.whole
    start = time.perf_counter()
    nll.document_nll(measured.model, blocks.take(1), batch_size=1)
    seconds = (1 + num_layouts) * blocks.num_blocks * (time.perf_counter() - start)
    part = f"{blocks.tokens.size:,} tokens"
    if blocks.num_blocks < whole.num_blocks:
        part += f" of {whole.tokens.size:,} (--max-tokens measures more)"
    number = f"{num_layouts} layout{'s' if num_layouts > 1 else ''}"
    reporter.announce(
        f"scoring full attention and {number} on {part}: at most {units.format_seconds(seconds)}"
    )


def show(result: NLLTable) -> None:
    """Print the NLL of every layout."""
    printing.show_alarm(result.alarm)
    title = f"{console.escape(result.name)}: without training"
    # Tabulate the layouts; equal ones share a row
    grid = console.Table(
        "layout", "global heads", "KV cache %", "coverage %", "NLL", "ΔNLL %", title=title
    )
    rows = result.rows[result.rows["hash"] != ""]
    same = result.rows.groupby("hash", sort=False)["strategy"]
    for row in result.rows.drop_duplicates("hash").itertuples():
        coverage = (
            f"{row.coverage_percent:.2f}" if row.coverage_percent == row.coverage_percent else "-"
        )
        difference = printing.change(row.delta_nll_percent, row.delta_nll_standard_error)
        names = console.escape(" = ".join(same.get_group(row.hash)))
        sizes = (str(row.num_global), f"{row.kv_cache_percent:.1f}")
        grid.add_row(names, *sizes, coverage, f"{row.nll:.4f}", difference)
    console.out.print(grid)
    # Add remarks
    memory = rows["kv_cache_percent"]
    if not is_equal_memory(memory):
        console.say(
            f"these layouts have {memory.min():.1f} to {memory.max():.1f} "
            "% of full attention's KV cache for a block; "
            "more memory loses less, so compare only layouts with nearly the same"
        )
    printing.about_errors(result.num_documents, result.effective_documents)
    printing.about_selection(result.num_selection, result.selected_by)
    console.print_path("scores", result.folder / "zero-shot.csv")
