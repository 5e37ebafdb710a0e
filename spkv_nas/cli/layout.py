"""The ``spkv-nas layout`` sub-commands and ``schema``: look at layout files, compare them, change their form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from spkv_nas.base.errors import UserError

if TYPE_CHECKING:
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.artifacts.proposal import Proposal

app = typer.Typer(name="layout", no_args_is_help=True, help="Show, compare and convert layout files.")
out = Console(highlight=False, soft_wrap=True)
_STYLES = {"G": "bold green", "L": "dim", ".": "dim", "+": "bold green", "-": "bold red"}


@app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="Layout files (YAML).", show_default=False)],
    probe: Annotated[
        str | None,
        typer.Option("--probe", "-p", help="Count coverage with this table: a name or a file.", metavar="NAME|FILE"),
    ] = None,
    workspace: Annotated[
        Path, typer.Option("--workspace", "-w", help="Folder with probes/.", show_default="here")
    ] = Path(),
) -> None:
    """Print the grids: G global, L local, and the number of global heads of every layer."""
    from spkv_nas.base.workspace import Workspace
    from spkv_nas.proposal.coverage import coverage
    from spkv_nas.stages.all import find_table

    table = None if probe is None else find_table(Workspace(workspace), probe)
    for file in files:
        proposal = _read(file)
        (layout,) = proposal.layouts.values()
        covered = ""
        if table is not None:
            covered = f", coverage {100 * coverage(proposal.table(table), layout):.2f} %"
        out.print(Text(f"{file}: {_summary(layout)}{covered}"))
        _grid(layout.heads, [str(row.count("G")) for row in layout.heads])


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="Layout (YAML).", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Layout (YAML).", show_default=False)],
) -> None:
    """Compare two layouts of one model: heads that differ, Jaccard index of the global heads, window.

    Exits as diff does: 0 if they make the same model, 1 if they differ, 2 if they cannot be compared.
    Strategy and provenance do not count.
    """
    from spkv_nas.artifacts.layout import Difference

    (one,), (other,) = (_read(file).layouts.values() for file in (a, b))
    difference = Difference.of(one, other)
    if one.hash == other.hash:
        out.print(f"the same layout: {_summary(one)}")
        return
    out.print(Text(f"- {a}: {_summary(one)}\n+ {b}: {_summary(other)}"))
    out.print(f"{difference.num_heads} heads differ, Jaccard index of the global heads {difference.jaccard:.3f}")
    if difference.num_heads:
        out.print("G global in both, . local in both, - global in the first only, + in the second only")
        _grid(difference.marks, ["" for _ in difference.marks])
    raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="Layout (.yaml), DuoAttention folder, PruLong or DuoAttention file (.tsv), density table (.csv).",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            help="New file: .yaml is a layout, .tsv a PruLong mask; a folder gets DuoAttention's two files.",
            show_default=False,
        ),
    ],
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", help="Global: so many heads of highest score.", metavar="N|N%")
    ] = None,
    sparsity: Annotated[
        float | None, typer.Option(help="Local: heads below this quantile of the scores, as both projects do.")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Global: heads with at least this score.")] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Window of local heads; the source's by default.", show_default=False)
    ] = None,
) -> None:
    """Change a layout's form: ours, DuoAttention's, PruLong's. Says what a form cannot hold.

    A file of scores becomes a layout by --budget, --sparsity or --threshold; one of zeros and ones is a layout.
    """
    from spkv_nas.proposal.convert import convert as convert_file

    lines = convert_file(source, target, budget=budget, sparsity=sparsity, threshold=threshold, window=window)
    out.print(Text("\n".join(lines)))


def schema(
    of: Annotated[str, typer.Argument(help="layout or recipe.", metavar="layout|recipe")] = "layout",
) -> None:
    """Print the JSON Schema of a file, for editors that complete and check YAML."""
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.training.recipe import Recipe

    schemas = {"layout": Layout.json_schema, "recipe": Recipe.model_json_schema}
    if of not in schemas:
        raise UserError(f"there is no schema of '{of}'; there is one of {' and of '.join(schemas)}")
    print(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schemas[of]()}, indent=2))


def _read(file: Path) -> Proposal:
    from spkv_nas.artifacts.proposal import Proposal

    if file.suffix in (".tsv", ".csv") or file.is_dir():
        raise UserError(f"{file} is no layout file; spkv-nas layout convert {file} NEW.yaml makes one of it")
    return Proposal.read([file])


def _summary(layout: Layout) -> str:
    share = f"{layout.num_global} of {layout.num_heads} global ({100 * layout.num_global / layout.num_heads:.1f} %)"
    size = f"{layout.num_layers} layers x {layout.num_kv_heads} KV heads"
    return f"{size}, {share}, window {layout.window}, hash {layout.hash}"


def _grid(rows: tuple[str, ...], notes: list[str]) -> None:
    """One line per layer: its number, its marks, a note."""
    for layer, (row, note) in enumerate(zip(rows, notes, strict=True)):
        marks = [(mark, _STYLES[mark]) for mark in row]
        out.print(Text.assemble(f"{layer:>4}  ", *marks, f"  {note}".rstrip()))
