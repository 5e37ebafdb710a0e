"""Print LongPPL for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path, say
from spkv_nas.stages.evaluate.cells import percent, say_sample_count, with_error
from spkv_nas.stages.evaluate.longppl.stage import LongPPLResult
from spkv_nas.stages.printing import change


def show(result: LongPPLResult) -> None:
    """Print LongPPL by domain, with the other checkpoint if there is one."""
    against = result.rows["against_ppl"].notna().any()
    pair_columns = ["against", "density %", "difference %"] if against else []
    grid = Table("text", "key tokens", "LongPPL", "PPL", "density %", *pair_columns, title=escape(result.name))
    for row in result.rows.itertuples():
        cells = [
            escape(row.domain),
            f"{row.num_keys:,} of {row.num_tokens:,}",
            with_error(row.longppl, row.standard_error),
            f"{row.ppl:.3f}",
            percent(row.density),
        ]
        if against:
            difference = change(row.difference_percent, row.difference_standard_error)
            cells += [with_error(row.against), percent(row.against_density), difference]
        grid.add_row(*cells)
    out.print(grid)
    say_sample_count(result.rows["num_documents"], "documents")
    for domain, reason in result.withheld.items():
        say(f"{domain}: {reason}")
    print_path("values", result.folder / "longppl.csv")
    print_path("key tokens and NLL by text", result.samples)
