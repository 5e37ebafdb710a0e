"""Print what ``probe`` returns, and its JSON document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape

from spkv_nas.artifacts.defaults import STRONG_SINK
from spkv_nas.artifacts.domains import about_small_domains
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.console import caution, out, say
from spkv_nas.stages.printing import identification, show_alarm


def show(table: HeadScores) -> None:
    """Print a probe's mean score, its highest head, and its warnings."""
    show_alarm(table.metadata.get("alarm"))
    densest = max((table.density[i, j], i, j) for i in range(table.num_layers) for j in range(table.num_kv_heads))
    measure = f"tau {table.tau:g}: density" if table.is_density else table.signal
    digits = ".3f" if table.is_density else ".3g"
    out.print(
        f"[bold]{escape(table.name)}[/bold]: {table.num_layers} layers x {table.num_kv_heads} KV heads, "
        f"{measure} mean {table.mean:{digits}}, std {table.std:{digits}}; "
        f"highest is layer {densest[1]}, head {densest[2]} ({densest[0]:{'.2f' if table.is_density else digits}})"
    )
    if (sinks := _about_sinks(table)) is not None:
        say(sinks)
    if (domain_warning := about_small_domains(table)) is not None:
        say(domain_warning)
    for line in table.diagnosis():
        caution(line)


def _about_sinks(table: HeadScores) -> str | None:
    """Return a sentence on the measured attention sinks and the sink tokens of layouts; None without either."""
    sink_tokens = f"{table.sinks or 'no'} sink token{'' if table.sinks == 1 else 's'}"
    if (mass := table.metadata.get("sink_mass")) is None:
        return f"layouts get {sink_tokens}" if table.sinks else None
    # The attention on the tokens that layouts get, or on the first, and the heads that were measured
    share = 100 * table.metadata.get("sink_tokens_mass", mass)
    first = "first token" if table.sinks < 2 else f"first {table.sinks} tokens"
    strong, heads = table.metadata["sink_heads"], table.metadata["measured_heads"]
    among = f"{heads} heads" + ("" if heads == table.num_heads else " without a native sliding window")
    sentence = (
        f"{share:.{0 if share >= 10 else 1}f} % of attention is on the {first}; {strong} of {among} "
        f"give the first four more than {100 * STRONG_SINK:.0f} %: layouts get {sink_tokens}"
    )
    # The massive activation that sinks come with
    if (massive := table.metadata.get("massive_activation")) is None:
        return sentence
    return (
        f"{sentence}\nlargest activation: {massive['ratio']:,.0f} times the layer's median (layer {massive['layer']}, "
        f"channel {massive['channel']}, token {massive['position']})"
    )


def document(table: HeadScores, folder: Path) -> dict[str, Any]:
    """Return a probe's mean over heads and the scores of every head."""
    return {
        **identification(table),
        "mean": table.mean,
        "standard_deviation": table.std,
        "sinks": table.sinks,
        "sink_mass": table.metadata.get("sink_mass"),
        "massive_activation": table.metadata.get("massive_activation"),
        "alarm": table.metadata.get("alarm"),
        "diagnosis": table.diagnosis(),
        "heads": table.rows,
        "folder": folder,
    }
