"""Print RULER scores for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.stages.evaluate.cells import percent, say_sample_count, with_error
from spkv_nas.stages.evaluate.ruler.stage import RulerResult
from spkv_nas.stages.printing import change


def show(result: RulerResult) -> None:
    """Print the scores by length and task, with the floor and, if there is one, the other checkpoint."""
    against = result.rows["against"].notna().any()
    columns = ["length", "task", "score", "floor", "density %", *(["against", "difference"] if against else [])]
    title = f"{escape(result.name)}: share of correct answers; floor: every head local"
    grid = Table(*columns, title=title)
    for row in result.rows.itertuples():
        cells = [
            str(row.length),
            row.task,
            with_error(row.score, row.standard_error),
            with_error(row.floor),
            percent(row.density),
        ]
        if against:
            cells += [with_error(row.against), change(row.difference, row.difference_standard_error)]
        grid.add_row(*cells, end_section=row.task.startswith("average"))
    out.print(grid)
    single_tasks = result.rows[~result.rows["task"].str.startswith("average")]
    say_sample_count(single_tasks["num_samples"], "samples per task")
    print_path("scores", result.folder / "ruler.csv")
    print_path("answers", result.samples)
