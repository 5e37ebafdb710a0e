"""Compare probes by the heads they rank densest: across domains, document halves, thresholds, seeds, checkpoints."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import scipy  # submodules load lazily on use

from spkv_nas.artifacts import grid, head_scores, proposal, result_tables
from spkv_nas.base import console, errors, locks
from spkv_nas.base.arrays import Float
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.contrib.compare.options import CompareOptions
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.proposal.strategies import densest
from spkv_nas.stages.commands import Result
from spkv_nas.stages.lookup import find_table

PARTS = ("domain", "half")


@dataclass(frozen=True)
class AgreementResult:
    """Agreement between probes: the table of ``agreement``, and its folder."""

    rows: pd.DataFrame
    folder: Path


def run(options: CompareOptions, reporter: Reporter = SILENT) -> Result:
    """Measure how far probes, or with ``split_by`` the parts of each probe, agree on the heads to choose.

    The table is written to ``reports/<name>/``.
    """
    # Read and split the probes
    tables: dict[str, head_scores.HeadScores] = {}
    find = partial(find_table, options.folders)
    for probe in options.probes:
        for label, table in parse_probe(probe, find, options.split_by):
            if label in tables and tables[label].content_hash == table.content_hash:
                raise errors.UserError(f"probe '{label}' is given twice")
            tables[probe if label in tables else label] = table
    if len(tables) < 2:
        raise errors.UserError(
            "compare needs at least two probes: give another, or split this one (--split-by "
            "domain or half)"
        )
    # Compare the heads that they choose
    first = next(iter(tables.values()))
    budget = parse_budget(options.budget, first.num_candidates)
    rows = agreement(tables, budget)
    folder = options.folders.report_dir(options.name or first.name)
    windows = {label: table.window for label, table in tables.items()}
    sinks = {label: table.local_sinks for label, table in tables.items()}
    proposal.warn_of_windows(windows, sinks, remedy="probe all of them with the same {}")
    separators = {label: table.record.separator for label, table in tables.items()}
    proposal.warn_of_separators(separators)
    # Write the table, and keep one of other probes
    with locks.locked(folder, "writes agreement.csv", reporter.announce):
        origin = {"probes": list(tables), "budget": budget, "windows": windows}
        result_tables.PROBE_PAIRS.write(folder, rows, origin, reporter)
    return Result(AgreementResult(rows, folder), show)


def show(result: AgreementResult) -> None:
    """Print how far probes agree, pair by pair."""
    # Table of the pairs
    rows = result.rows
    first = rows.iloc[0]
    labels = short_labels(rows)
    title = f"{first['budget']} highest-scoring heads (Jaccard by chance {first['chance']:.2f})"
    table = console.Table(
        console.Column(overflow="fold"),
        console.Column(overflow="fold"),
        "Jaccard",
        "Spearman",
        "transfer %",
        "mean |Δ|",
        title=title,
    )
    for row in rows.itertuples():
        table.add_row(
            console.escape(labels[row.first]),
            console.escape(labels[row.second]),
            f"{row.jaccard:.2f}",
            "-" if math.isnan(row.spearman) else f"{row.spearman:.3f}",
            f"{100 * row.transfer:.1f}",
            f"{row.mean_difference:.3f}",
        )
    console.out.print(table)
    # Notes
    if rows["spearman"].isna().any():
        console.say("Spearman -: undefined, because all scores of one of the two probes are equal")
    console.out.print(
        "transfer: coverage on one probe by the heads selected on the other, relative to its "
        "best; the lower of both directions"
    )
    console.print_path("agreement", result.folder / "agreement.csv")


def parse_probe(
    text: str, find: Callable[[str], head_scores.HeadScores], split_by: str | None = None
) -> Iterator[tuple[str, head_scores.HeadScores]]:
    """Yield (label, table) pairs for a probe given on the command line, which ``find`` loads by its name or file.

    A suffix ``@TAU`` of the name gives another threshold. ``split_by`` is "domain" for a table per domain, "half" for
    one of the even and one of the odd documents.

    Raises ``UserError``: ``split_by`` is unknown, the table does not have the threshold, there is a single domain, or
    no per-document counts to halve.
    """
    if split_by is not None and split_by not in PARTS:
        raise errors.UserError(f"--split-by must be {' or '.join(PARTS)}; found '{split_by}'")
    # Load the table at its threshold
    source, separator, tau = text.rpartition("@")
    if text.endswith((".csv", ".tsv")):
        table = find(text)
        label = text
    elif separator:
        table = find(source)
        label = f"{table.name}@{tau}"
        table = table.at_tau(_parse_threshold(text, tau))
    else:
        table = find(text)
        label = table.name
    if split_by is None:
        yield label, table
        return
    # Split it by domain or into halves
    split = {"domain": _domains, "half": _halves}[split_by]
    for part, values in split(table):
        yield f"{label}:{part}", values


def _parse_threshold(text: str, tau: str) -> float:
    """Return the threshold of a probe ``text`` that ends with ``@tau``."""
    try:
        return float(tau)
    except ValueError as error:
        raise errors.UserError(
            f"'{text}': the threshold after the @ must be a number in [0, 1]"
        ) from error


def agreement(tables: Mapping[str, head_scores.HeadScores], budget: int) -> pd.DataFrame:
    """Compare every pair of tables, given by label, each of which chooses its ``budget`` densest heads.

    Returns one row per pair with columns first, second, budget; jaccard (heads chosen by both / by either); chance (its
    expectation for as many random heads); spearman (rank correlation of the densities, NaN where one does not vary);
    transfer (coverage on one table of the heads chosen on the other, relative to the best possible; the worse of both
    directions); mean_difference (mean absolute difference of the densities).

    Raises ``UserError``: the tables have different grids, or every density of one is 0.
    """
    # Check that the tables are comparable
    (name, first), *remaining = tables.items()
    for label, table in remaining:
        grid.check_grid(
            f"the probe '{label}'",
            table.heads_per_layer,
            f"'{name}'",
            first.heads_per_layer,
            "compare probes of models with the same number of layers and KV heads",
        )
    for label, table in tables.items():
        if table.mean == 0.0:
            raise errors.UserError(
                f"every head density of '{label}' is 0 at tau = {table.tau:g}: choose a smaller tau"
            )
    # Measure every pair
    share = budget / first.num_heads
    rows = []
    for (label_a, table_a), (label_b, table_b) in combinations(tables.items(), 2):
        chosen_a = densest(table_a.values, budget)
        chosen_b = densest(table_b.values, budget)
        density_a = table_a.density
        density_b = table_b.density
        # Coverage on one table by the heads chosen on the other, relative to its best
        a_on_b = density_b[chosen_a].sum() / density_b[chosen_b].sum()
        b_on_a = density_a[chosen_b].sum() / density_a[chosen_a].sum()
        rows.append(
            {
                "first": label_a,
                "second": label_b,
                "budget": budget,
                "jaccard": (chosen_a & chosen_b).sum() / (chosen_a | chosen_b).sum(),
                "chance": share / (2 - share),
                "spearman": _spearman(density_a, density_b),
                "transfer": min(a_on_b, b_on_a),
                "mean_difference": np.abs(density_a - density_b).mean(),
            }
        )
    return pd.DataFrame(rows)


def _spearman(first: Float, second: Float) -> float:
    """Return the rank correlation of two densities; NaN where one does not vary."""
    if not (np.ptp(first) > 0 and np.ptp(second) > 0):
        return math.nan
    return float(scipy.stats.spearmanr(first.ravel(), second.ravel()).statistic)


def short_labels(rows: pd.DataFrame) -> dict[str, str]:
    """Map every label of the table, in order, to one without the probe's name if all share it."""
    labels = list(dict.fromkeys([*rows["first"], *rows["second"]]))
    names = set()
    for label in labels:
        # A label is NAME:PART, NAME@TAU or NAME
        before_part, _, _ = label.rpartition(":")
        before_tau, _, _ = label.rpartition("@")
        names.add(before_part or before_tau or label)
    shared = names.pop() if len(names) == 1 else ""
    return {label: label[len(shared) :].lstrip(":") or label for label in labels}


def _domains(table: head_scores.HeadScores) -> Iterator[tuple[str, head_scores.HeadScores]]:
    """Yield (domain, table of that domain). Raises ``UserError`` if there is only one."""
    if len(table.domains) == 1:
        raise errors.UserError(
            f"the probe '{table.name}' has a single domain, '{table.domains[0]}', so there are no "
            "domains to compare\n"
            "probe text of several domains, or leave out --split-by"
        )
    for domain in table.domains:
        rows = table.rows[table.rows["domain"] == domain]
        yield domain, replace(table, rows=rows, documents=None, histogram=None)


def _halves(table: head_scores.HeadScores) -> Iterator[tuple[str, head_scores.HeadScores]]:
    """Yield ("even", table) and ("odd", table) of the documents; domains with a single document are left out.

    Raises ``UserError``: the table has no per-document counts, or no domain with two documents.
    """
    documents = table.documents
    if documents is None:
        raise errors.UserError(
            f"the probe '{table.name}' ({table.signal}) has no scores by document, so it cannot "
            "be split into halves\n"
            "probe two parts of the text under different names (--data, --name), and compare these"
        )
    # Keep the domains with two documents or more
    names = pd.Series(documents.domains)
    num_documents = np.bincount(documents.domain, minlength=len(names))
    rows = table.rows[table.rows["domain"].isin(names[num_documents > 1])]
    if rows.empty:
        raise errors.UserError(
            f"the probe '{table.name}' has only one document per domain, so it cannot be split "
            "into halves\n"
            "probe text with more documents"
        )
    # Number the documents within their domain
    rank = pd.Series(documents.domain).groupby(documents.domain).cumcount().to_numpy()
    domain = rows["domain"].map(documents.domains.index)
    # Recompute scores from each half
    for part, parity in (("even", 0), ("odd", 1)):
        half = documents.take(rank % 2 == parity)
        num_tokens = np.bincount(half.domain, half.tokens, len(names)).astype(int)[domain]
        scores = half.density()[domain, rows["layer"], rows["kv_head"]]
        halved = rows.assign(score=scores, num_tokens=num_tokens, standard_error=np.nan)
        yield part, replace(table, rows=halved, documents=None, histogram=None)
