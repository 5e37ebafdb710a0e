"""Show, compare and convert layout files: the ``layout`` commands."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.text import Text

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.proposal import Difference, Proposal
from spkv_nas.base import errors, progress
from spkv_nas.base.console import out, say
from spkv_nas.proposal.coverage import coverage
from spkv_nas.proposal.foreign_formats import convert as convert_file
from spkv_nas.stages import commands, lookup
from spkv_nas.stages.commands import Result
from spkv_nas.stages.options.layout import ConvertOptions, DiffOptions, ShowLayoutsOptions

# Layout file, and its coverage in [0, 1] if there are a probe and one window
Shown = tuple[Path, Layout, float | None]
Compared = tuple[Layout, Layout, Difference]  # two layouts, and the difference of their heads
# Other marks are dim
_STYLES = {"G": "bold green", "+": "bold green", "-": "bold red", "~": "bold yellow"}


def print_grid(rows: Sequence[str], notes: Sequence[str]) -> None:
    """Print one line per layer: its index, its marks, a note."""
    for layer, (row, note) in enumerate(zip(rows, notes, strict=True)):
        marks = [(mark, _STYLES.get(mark, "dim")) for mark in row]
        out.print(Text.assemble(f"{layer:>4}  ", *marks, f"  {note}".rstrip()), soft_wrap=True)


def heads_document(layout: Layout) -> dict[str, object]:
    """Return a layout's heads, counts and provenance."""
    return {
        "heads": layout.heads,
        "num_global": layout.num_global,
        "num_heads": layout.num_heads,
        "window": layout.window,
        "windows": layout.windows or None,
        "sinks": layout.sinks,
        "strategy": layout.strategy,
        "hash": layout.hash,
    }


def read_layout(file: Path) -> Proposal:
    """Read one layout file. Raises ``UserError``, for a file of scores with the command that converts it."""
    if file.suffix in (".tsv", ".csv") or file.is_dir():
        stem = file.name if file.is_dir() else file.stem  # folder names may contain dots
        target = file.with_name(f"{stem}.yaml")
        if target.exists():
            target = file.with_name(f"{stem}-layout.yaml")
        command = commands.command_line(ConvertOptions(source=file, target=target, budget="25%"))
        raise errors.UserError(
            f"{file} is not a layout file; convert it first\n{commands.next_line(command)}"
        )
    return Proposal.read([file])


def _show(shown: list[Shown]) -> None:
    """Print layouts as grids, with the number of global heads of every layer."""
    for file, layout, covered in shown:
        about = f"{file}: {layout.description}"
        if covered is not None:
            about += f", coverage {100 * covered:.2f} %"
        out.print(Text(about), soft_wrap=True)
        counts = [str(row.count("G")) for row in layout.heads]
        print_grid(layout.heads, counts)


def _document(shown: list[Shown]) -> dict[str, object]:
    layouts = [
        {"file": file, **heads_document(layout), "coverage": covered}
        for file, layout, covered in shown
    ]
    return {"layouts": layouts}


def _show_difference(files: Sequence[Path], compared: Compared) -> None:
    first, second, delta = compared
    if first.hash == second.hash:
        out.print(f"the same layout: {first.description}", soft_wrap=True)
        return
    out.print(Text(f"- {files[0]}: {first.description}"), soft_wrap=True)
    out.print(Text(f"+ {files[1]}: {second.description}"), soft_wrap=True)
    num_windows = "".join(delta.marks).count("~")
    others = f", {num_windows} only in their window" if num_windows else ""
    out.print(
        f"{delta.num_heads} heads differ{others}, "
        f"Jaccard index of the global heads {delta.jaccard:.3f}"
    )
    if delta.num_heads or num_windows:
        legend = (
            "G: global in both; .: local in both; -: "
            "global only in the first; +: global only in the second"
        )
        if num_windows:
            legend += "; ~: local in both, with another window"
        out.print(legend)
        print_grid(delta.marks, [""] * len(delta.marks))


def _difference_document(compared: Compared) -> dict[str, object]:
    first, second, delta = compared
    return {
        "same": first.hash == second.hash,
        "layouts": [heads_document(first), heads_document(second)],
        "num_heads": delta.num_heads,
        "jaccard": delta.jaccard,
        "marks": delta.marks,
    }


def show(options: ShowLayoutsOptions, reporter: progress.Reporter) -> Result:
    """Run ``layout show``: read layout files, and compute their coverage if a probe is named."""
    table = None if options.probe is None else lookup.find_table(options.folders, options.probe)
    shown: list[Shown] = []
    for file in options.files:
        proposal = read_layout(file)
        (layout,) = proposal.layouts.values()
        covered = None if table is None else coverage(proposal.table(table), layout)
        shown.append((file, layout, None if layout.windows else covered))
    return Result(shown, _show, _document)


def diff(options: DiffOptions, reporter: progress.Reporter) -> Result:
    """Run ``layout diff``: compare two layouts of one model head by head."""
    (first,) = read_layout(options.a).layouts.values()
    (second,) = read_layout(options.b).layouts.values()
    compared = (first, second, Difference.of(first, second))
    show_files = partial(_show_difference, (options.a, options.b))
    exit_code = 0 if first.hash == second.hash else 1
    return Result(compared, show_files, _difference_document, exit_code=exit_code)


def convert(options: ConvertOptions, reporter: progress.Reporter) -> Result:
    """Run ``layout convert``."""
    lines = convert_file(
        options.source,
        options.target,
        budget=options.budget,
        sparsity=options.sparsity,
        threshold=options.threshold,
        window=options.window,
        sinks=options.sinks,
    )
    return Result(
        lines,
        lambda lines: say("\n".join(lines)),
        lambda lines: {"file": options.target, "notes": lines},
    )
