"""Print the metrics of downstream tasks for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.stages.evaluate.cells import percent, say_sample_count, with_error
from spkv_nas.stages.evaluate.tasks.stage import TasksResult
from spkv_nas.stages.printing import change


def show(result: TasksResult) -> None:
    """Print every task by metric, with the other checkpoint if there is one."""
    against = result.rows["against"].notna().any()
    pair_columns = ["against", "density %", "difference"] if against else []
    grid = Table("task", "metric", "shots", "value", "density %", *pair_columns, title=escape(result.name))
    for row in result.rows.itertuples():
        shots = "-" if row.num_fewshot != row.num_fewshot else f"{row.num_fewshot:g}"
        cells = [
            escape(row.task),
            escape(row.metric),
            shots,
            with_error(row.value, row.standard_error),
            percent(row.density),
        ]
        if against:
            difference = change(row.difference, row.difference_standard_error)
            cells += [with_error(row.against), percent(row.against_density), difference]
        grid.add_row(*cells)
    out.print(grid)
    say_sample_count(result.rows["num_samples"], "samples per task")
    print_path("values", result.folder / "tasks.csv")
    print_path("samples", result.samples)
