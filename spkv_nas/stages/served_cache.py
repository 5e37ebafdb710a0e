"""Plan the cache of a model in a serving engine, as it is and with layouts, without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import console, progress, units
from spkv_nas.cost.model_cache import read_model_cache, with_layout
from spkv_nas.engines.cache import CachePlan, LayerCache, ModelCache
from spkv_nas.engines.engine import Serving
from spkv_nas.model.source import config_path
from spkv_nas.stages.context import choose_context

_AS_IS = "as it is"  # name of the model without a layout of the options


@dataclass(frozen=True)
class ServedCache:
    """Caches that an engine plans for a model."""

    name: str  # of the model, as the user gave it
    model: ModelCache  # the model as it is
    serving: Serving
    context: int  # tokens of a request
    requests: int  # requests of that length at once
    memory: int | None  # bytes of the cache; None: not limited
    plans: Mapping[str, CachePlan]  # of the model as it is, and with each layout, by name

    def tokens(self, plan: CachePlan) -> int | None:
        """Return the tokens of the requests that fit in the memory; None if it is not limited."""
        if self.memory is None:
            return None
        return int(plan.concurrency(self.memory) * self.context)

    @property
    def remarks(self) -> list[str]:
        """Return what the plans assume, what they were checked with, and what they leave out, by line."""
        engine = self.serving.engine
        model = self.model
        remarks = [f"{engine.title}: {engine.evidence}; {engine.note}"]
        if self.serving.words:
            names = ", ".join((*engine.settings, "kv-dtype"))
            remarks.append(f"settings ({names}): {self.serving.words}")
        for plan in self.plans.values():
            remarks += [f"{engine.title} {note}" for note in plan.notes]
        if model.num_shared:
            remarks.append(f"{model.num_shared} layers read the keys of another layer: no cache")
        if model.num_learned_sinks:
            number = model.num_learned_sinks
            remarks.append(f"learned sinks in {number} layers: weights, no cache")
        remarks.append(f"not counted: {', '.join(engine.uncounted)}")
        return list(dict.fromkeys(remarks))


def plan_served(
    source: str,
    serving: Serving,
    *,
    context: str | None,
    requests: int,
    memory: str | None,
    layouts: Sequence[Path] = (),
    reporter: progress.Reporter,
) -> ServedCache:
    """Plan the cache of a model as it is, and with each layout.

    Raises ``UserError``: the model's cache is not known, or the engine does not serve a layout.
    """
    model = read_model_cache(config_path(source))
    tokens = choose_context(context, model.positions, reporter)
    plans = {_AS_IS: serving.plan(model, tokens)}
    for file in layouts:
        layout = Layout.read(file)
        name = f"{layout.strategy}, {layout.num_global} of {layout.num_heads} heads"
        advice = f"leave out {file}, or use another engine"
        serving.engine.check_sinks(layout.sinks, advice)
        serving.engine.check_windows(len(layout.legend), advice)
        plans[name] = serving.plan(with_layout(model, layout), tokens)
    return ServedCache(
        name=source,
        model=model,
        serving=serving,
        context=tokens,
        requests=requests,
        memory=None if memory is None else units.parse_bytes(memory),
        plans=plans,
    )


def show(served: ServedCache) -> None:
    """Print the memory of a request by what layers keep, and of all requests with each layout."""
    serving = served.serving
    dtype = serving.settings.kv_dtype or served.model.dtype
    where = f"{serving.engine.title}, requests of {served.context:,} tokens, {dtype}"
    columns = ("layers", "keep", "heads x size", "a token", "one request")
    grid = console.Table(*columns, title=f"{console.escape(Path(served.name).name)}: {where}")
    for row in served.plans[_AS_IS].rows:
        grid.add_row(
            str(row.num_layers),
            row.layer.kind,
            row.layer.size,
            units.format_bytes(_token_bytes(served, row.layer) * row.num_layers),
            units.format_bytes(row.request_bytes),
        )
    console.out.print(grid)
    console.out.print(_table_of_requests(served))
    console.say("\n".join(served.remarks))


def _table_of_requests(served: ServedCache) -> console.Table:
    """Return a table of what requests take in all layers, and how many fit, with each layout."""
    titles = ["", "one request"]
    if len(served.plans) > 1:
        titles.insert(1, "served as")
    if served.requests > 1:
        titles.append(f"{served.requests:,} requests")
    if served.memory is not None:
        titles += [f"requests in\n{units.format_bytes(served.memory)}", "tokens"]
    grid = console.Table(*titles)
    for name, planned in served.plans.items():
        cells = [console.escape(name), units.format_bytes(planned.request_bytes)]
        if len(served.plans) > 1:
            cells.insert(1, planned.form)
        if served.requests > 1:
            cells.append(units.format_bytes(planned.memory(served.requests)))
        if served.memory is not None:
            cells += [f"{planned.concurrency(served.memory):,.2f}", f"{served.tokens(planned):,}"]
        grid.add_row(*cells)
    return grid


def _token_bytes(served: ServedCache, layer: LayerCache) -> int:
    """Return the bytes of a token in a layer on one rank, without padding; 0 for a state."""
    serving = served.serving
    item_bytes = serving.settings.item_bytes(served.model.dtype, serving.engine.sizes)
    return int(layer.token_numbers * item_bytes)


def document(served: ServedCache) -> dict[str, object]:
    """Return the sizes of all plans, by what layers keep, and what they assume."""
    rows = []
    for name, planned in served.plans.items():
        kinds = [
            {
                "kind": row.layer.kind,
                "layers": row.num_layers,
                "heads": row.layer.num_heads,
                "size": row.layer.size,
                "token_bytes": _token_bytes(served, row.layer) * row.num_layers,
                "request_bytes": row.request_bytes,
            }
            for row in planned.rows
        ]
        memory = served.memory
        rows.append(
            {
                "name": name,
                "form": planned.form,
                "kinds": kinds,
                "page_bytes": planned.page_bytes,
                "request_bytes": planned.request_bytes,
                "bytes": planned.memory(served.requests),
                "fitting_requests": None if memory is None else planned.concurrency(memory),
                "tokens": served.tokens(planned),
            }
        )
    return {
        "name": served.name,
        "family": served.model.family,
        "engine": served.serving.engine.title,
        "settings": served.serving.settings,
        "dtype": served.serving.settings.kv_dtype or served.model.dtype,
        "context": served.context,
        "requests": served.requests,
        "memory": served.memory,
        "shared_layers": served.model.num_shared,
        "learned_sinks": served.model.num_learned_sinks,
        "caches": rows,
        "remarks": served.remarks,
    }
