"""Print the agreement of two models for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from spkv_nas.base.console import out, print_path
from spkv_nas.evaluation.agreement import GREEDY
from spkv_nas.stages.evaluate.agreement.stage import AgreementResult
from spkv_nas.stages.evaluate.cells import say_sample_count, with_error


def show(result: AgreementResult) -> None:
    """Print agreement and acceptance, and the tokens per pass of the dense model at each number of drafted tokens."""
    rows, dense = result.rows, escape(result.against)
    for decoding, row in rows.drop_duplicates("decoding").set_index("decoding").iterrows():
        if decoding == GREEDY:
            agreement = with_error(row["agreement"], row["agreement_standard_error"])
            identical = f"{row['identical_tokens']:.1f} ± {row['identical_tokens_standard_error']:.1f}"
            length = row["num_tokens"] / row["num_prompts"]
            out.print(
                f"[bold]{escape(result.name)}[/bold]: agreement with {dense} {agreement} over "
                f"{int(row['num_tokens']):,} greedy tokens; {identical} of {length:.0f} tokens "
                "before the first difference"
            )
        else:
            acceptance = with_error(row["acceptance"], row["acceptance_standard_error"])
            out.print(
                f"acceptance as a draft model {acceptance} over {int(row['num_tokens']):,} tokens sampled at "
                f"temperature {row['temperature']:g}"
            )
    grid = Table("drafted tokens", *rows["decoding"].unique(), title=f"tokens per pass of {dense}")
    for number, group in rows.groupby("draft_tokens"):
        values = [f"{row.tokens_per_pass:.2f} ± {row.tokens_per_pass_standard_error:.2f}" for row in group.itertuples()]
        grid.add_row(str(number), *values)
    out.print(grid)
    say_sample_count(rows["num_documents"], "documents")
    print_path("values", result.folder / "token-agreement.csv")
    print_path("continuations and values by token", result.samples)
