"""List all readers of files that users provide or that lie in a workspace, for ``attack.mutants``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from helpers import RECIPE, make_comparison, make_domain_table, make_layouts, make_search

from attack.mutants import Reader
from spkv_nas.artifacts.comparison import write_comparison
from spkv_nas.artifacts.displacement import COLUMNS
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.head_tables import Gains, read_density_log
from spkv_nas.artifacts.histogram import DocumentCounts, LogitHistogram
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.artifacts.proposal import Proposal
from spkv_nas.artifacts.result_tables import (
    PROBE_PAIRS,
    VERDICT,
    TrainedModel,
    read_checkpoints,
    write_checkpoints,
)
from spkv_nas.base.files import read_json, read_text, read_yaml, write_json
from spkv_nas.base.schema import validate
from spkv_nas.base.tables import write_csv
from spkv_nas.contrib.compare.stage import agreement, short_labels
from spkv_nas.contrib.reproduce.ablate.ablation_plan import Ablations
from spkv_nas.contrib.reproduce.scaling.stage import describe_laws, fit_runs, read_runs
from spkv_nas.cost.calibration import Calibration, LayerCase, Timing
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.data.sources import documents
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.evaluation.ranking import Trust
from spkv_nas.proposal.constraints import read_head_costs
from spkv_nas.proposal.foreign_formats import read_scores
from spkv_nas.proposal.strategies import densest
from spkv_nas.report.density_charts import density_evolution_chart
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.layout_explorer import explorer_data
from spkv_nas.report.result_charts import search_charts
from spkv_nas.report.tables import findings, search_rows
from spkv_nas.report.verdict import conclude
from spkv_nas.stages.report import read_results
from spkv_nas.training.recipe import Recipe


def make_probe() -> HeadScores:
    """Make a table of 4 layers x 2 heads and 2 domains, with everything that a probe writes beside it."""
    draw = np.random.default_rng(0)
    edges, domains = np.linspace(-6, 6, 13), ("code", "prose")
    bins = draw.integers(0, 20, (6, 4, 2, 14))
    bins[..., 0] += 300 - bins.sum(-1)
    domain = np.array([0, 0, 0, 1, 1, 1])
    counts = np.stack([bins[domain == index].sum(0) for index in (0, 1)])
    histogram = LogitHistogram(edges, counts, domains)
    kept = bins[..., 7:].sum(-1).astype(float)
    counted = DocumentCounts(kept, np.full(6, 300), domain, domains, bins, edges)
    density = counted.density()
    rows = [
        {
            "layer": layer,
            "kv_head": head,
            "score": density[index, layer, head],
            "domain": name,
            "num_tokens": 900,
            "num_documents": 3,
            "standard_error": 0.01,
        }
        for index, name in enumerate(domains)
        for layer, head in np.ndindex(4, 2)
    ]
    positions = pd.DataFrame(
        [
            {
                "layer": layer,
                "kv_head": head,
                "start": start,
                "end": start + 8,
                "density": 0.5,
                "num_tokens": 10,
            }
            for layer, head, start in np.ndindex(4, 2, 2)
        ]
    ).assign(start=lambda rows: 8 * rows["start"], end=lambda rows: rows["start"] + 8)
    record = ProbeRecord.of(
        {"model": "m", "data": {"sources": ["text"]}, "head_dim": 8, "dtype": "float32"}
    )
    gains = Gains(density[0] / 100, density[1] / 500)
    return HeadScores(
        "p", pd.DataFrame(rows), 0.5, 8, positions, None, histogram, counted, record, gains=gains
    )


def _write_probe(name: str) -> Callable[[Path], Path]:
    """Return a writer of probes whose record has no hashes, so that damage reaches the other readers."""

    def make(folder: Path) -> Path:
        make_probe().write(folder)
        record = folder / "probe.yaml"
        record.write_text(re.sub(r"\Asha256:\n(?: .*\n)*", "", record.read_text()))
        return folder / name

    return make


def _use_table(file: Path) -> None:
    table = HeadScores.read(file.parent)
    for part in (table, table.at_tau(0.3)) if table.histogram is not None else (table,):
        part.diagnosis()
        assert part.density.shape == part.standard_error.shape == part.grid
        if part.documents is not None:
            part.documents.density()
        if part.gains is not None:
            Trust.of(part.values, densest(part.values, 3), part.gains).sentence()


def _write(name: str, text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return make


def _make_layout(folder: Path) -> Path:
    origin = {
        "probe": "p",
        "budget": 3,
        "coverage": 0.684,
        "tau": 0.5,
        "seed": None,
        "created_by": "spkv-nas",
    }
    Layout(("GL", "LL", "GG", "LL"), 8, "densest", origin).write(folder / "densest.yaml")
    return folder / "densest.yaml"


def _use_layout(file: Path) -> None:
    for name, layout in Proposal.read([file]).layouts.items():
        layout.write(file.parent / "again" / f"{name}.yaml")


def make_results(name: str) -> Callable[[Path], Path]:
    """Return a writer of results, whose records have no hashes, so that damage reaches what reads their keys."""
    correlation = {"rho": -1.0, "p_value": 0.1, "layouts": 9, "interval": [-1.0, 0.2]}
    records = {
        "comparison": {"rank_correlation": correlation, "effective_documents": 9.0},
        "search": {"window": 8, "sinks": 1, "steps": {"short": 30, "full": 120}},
        "verdict": {
            "answers": {"a": "open", "b": "fails"},
            "risk": 0.05,
            "nouns": {"nll": "documents"},
            "left_out": {"documents": 7, "selected_by": ["probe p", "search q"]},
            "unrecorded": ["b"],
        },
    }
    verdict = (
        ("a", "nll", "open", 1.0, "%", 0.1, -0.4, 1.9, 64, 9, 0.2, 1.0),
        ("b", "nll", "fails", 1.0, "%", *[2] * 7),
    )

    def make(folder: Path) -> Path:
        dense = pd.DataFrame({"strategy": ["dense"], "nll": [1.99]})
        write_comparison(folder / "comparison.csv", pd.concat([dense, make_comparison()]))
        write_csv(folder / "search.csv", make_search())
        write_csv(
            folder / "verdict.csv",
            pd.DataFrame(verdict, columns=VERDICT.header[: -len(COLUMNS) - 1]).assign(
                p_passes=0.5, p_fails=0.5
            ),
        )
        for record, content in records.items():
            (folder / f"{record}.yaml").write_text(json.dumps(content, indent=1))
        return folder / name

    return make


def use_results(file: Path) -> None:
    inputs = ReportInputs(
        make_domain_table(), make_layouts("densest", "last"), **read_results(file.parent)
    )
    assert conclude(inputs).lead
    findings(inputs.record)
    explorer_data(inputs, conclude(inputs))
    if inputs.search is not None:
        search_charts(inputs.search, None)
        search_rows(inputs)


def _make_agreement(folder: Path) -> Path:
    PROBE_PAIRS.write(folder, agreement({"p": make_probe(), "q": make_probe()}, 3), {})
    return folder / "agreement.csv"


def _make_checkpoints(folder: Path) -> Path:
    models = [
        TrainedModel("densest", seed, "abcd", folder / "runs" / f"x-{seed}") for seed in range(3)
    ]
    write_checkpoints(folder, models, folder)
    return folder / "checkpoints.csv"


def _make_calibration(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        timings = tuple(
            Timing(context, count, 1e-3 * context)
            for context in (1024, 4096)
            for count in (0, 1, 2)
        )
        case = LayerCase(8, 2, 8, "float32", 8, 1, "cpu")
        Calibration(case, "a machine", 2, timings, {"torch": "2"}).write(folder)
        return folder / name

    return make


def _use_calibration(file: Path) -> None:
    result = Calibration.read(file.parent)
    assert result.contexts
    assert result.source


def _use_runs(file: Path) -> None:
    runs = read_runs(file)
    describe_laws(runs, fit_runs(runs))


def _make_nll(folder: Path) -> Path:
    DocumentNLL(np.array([30.0, 41.5, 0.0]), np.array([10, 12, 0])).save(folder / "heldout-nll.npz")
    return folder / "heldout-nll.npz"


def _use_nll(file: Path) -> None:
    nll = DocumentNLL.read(file)
    assert nll.mean
    paired_difference(nll, DocumentNLL(np.array([31.0, 40.0, 0.0]), np.array([10, 12, 0])))


def _make_blocks(folder: Path) -> Path:
    tokens = np.arange(96, dtype=np.int32).reshape(3, 32)
    owner = np.repeat(np.arange(4, dtype=np.int32), 24).reshape(3, 32)
    infos = tuple(DocumentInfo(str(i), "all", f"{i}.txt") for i in range(4))
    TokenBlocks(tokens, owner, infos).save(folder / "train.npz")
    return folder / "train.npz"


def _use_blocks(file: Path) -> None:
    blocks = TokenBlocks.read(file)
    assert blocks.domains
    assert (
        np.bincount(blocks.document.ravel(), minlength=len(blocks.documents)).sum()
        == blocks.tokens.size
    )


def _use_source(file: Path) -> None:
    for document in documents([str(file)], Path()):
        document.text.encode()
        document.domain.encode()


def _make_parquet(folder: Path) -> Path:
    pd.DataFrame({"text": ["one", "two"], "domain": ["a", None]}).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def _make_run(folder: Path) -> Path:
    write_json(
        folder / "run.json",
        {"steps": 8, "seconds": 1.5, "heldout_density": [[0.5, 0.25]], "recipe": {"name": "x"}},
    )
    return folder / "run.json"


def _make_duo(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "full_attention_heads.tsv").write_text("0.5\t0.25\n1.0\t-2.4e-4\n0.0\t0.75\n")
        config = {
            "sink_size": 128,
            "recent_size": 256,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return folder / name

    return make


def _use_scores(file: Path) -> None:
    read_scores(file.parent).choose(budget=1)


_ABLATIONS = f"""\
name: mine
recipe:
{RECIPE.replace("name", "  name", 1).replace(chr(10), chr(10) + "  ").rstrip()}
rows:
  baseline: {{}}
  wide: {{gates: {{window: 16}}}}
  full: {{variant: full-attention}}
"""


def _use_ablations(file: Path) -> None:
    content = validate(Ablations, read_yaml(file, "ablations"), f"ablations {file}")
    Recipe.parse(content.recipe, file.parent, "the recipe")


_LOG = "step,layer,kv_head,density\n" + "".join(
    f"{step},{layer},{head},0.{step}{head}\n"
    for step in (1, 2, 3)
    for layer in (0, 1)
    for head in (0, 1)
)
_SCALING = "name,variant,train_flops,nll,held_out\n" + "".join(
    f"r{i},dense,{10.0 ** (14 + i):g},{1.7 + 40 * (10.0 ** (14 + i)) ** -0.09:.4f},{int(i == 6)}\n"
    for i in range(7)
)
_WEIGHTS = "layer,kv_head,weight\n" + "".join(
    f"{layer},{head},1.5\n" for layer in range(4) for head in range(2)
)
_JSONL = '{"text": "one two", "domain": "web"}\n{"text": "three", "domain": null}\n\n{"text": "four", "n": [1, {}]}\n'

READERS = (
    Reader("layout", _make_layout, _use_layout),
    Reader("recipe", _write("recipe.yaml", RECIPE), lambda file: Recipe.read(file).warnings()),
    Reader("ablations", _write("ablations.yaml", _ABLATIONS), _use_ablations),
    Reader("density table", _write_probe("density.csv"), _use_table),
    Reader("probe", _write_probe("probe.yaml"), _use_table),
    Reader("positions", _write_probe("positions.csv"), _use_table),
    Reader("histogram", _write_probe("histogram.npz"), _use_table),
    Reader("counts by document", _write_probe("documents.npz"), _use_table),
    Reader("gains", _write_probe("gains.csv"), _use_table),
    Reader("comparison", make_results("comparison.csv"), use_results),
    Reader("comparison record", make_results("comparison.yaml"), use_results),
    Reader("search", make_results("search.csv"), use_results),
    Reader("search record", make_results("search.yaml"), use_results),
    Reader("verdict", make_results("verdict.csv"), use_results),
    Reader("verdict record", make_results("verdict.yaml"), use_results),
    Reader(
        "agreement", _make_agreement, lambda file: short_labels(PROBE_PAIRS.read(file.parent)[0])
    ),
    Reader(
        "checkpoints", _make_checkpoints, lambda file: read_checkpoints(file.parent, Path("root"))
    ),
    Reader("calibration", _make_calibration("calibration.yaml"), _use_calibration),
    Reader("times", _make_calibration("calibration.csv"), _use_calibration),
    Reader("runs", _write("runs.csv", _SCALING), _use_runs),
    Reader(
        "weights", _write("weights.csv", _WEIGHTS), lambda file: read_head_costs(file, make_probe())
    ),
    Reader(
        "density log",
        _write("density-log.csv", _LOG),
        lambda file: density_evolution_chart(read_density_log(file)),
    ),
    Reader("held-out NLL", _make_nll, _use_nll),
    Reader("blocks", _make_blocks, _use_blocks),
    Reader("run record", _make_run, lambda file: read_json(file, "run record")),
    Reader("head scores", _make_duo("full_attention_heads.tsv"), _use_scores),
    Reader("config of head scores", _make_duo("config.json"), _use_scores),
    Reader("JSON lines", _write("a.jsonl", _JSONL), _use_source),
    Reader("text", _write("a.txt", "one\ntwo\n"), _use_source),
    Reader("parquet", _make_parquet, _use_source),
    Reader("prompt", _write("prompt.txt", "say\n"), lambda file: read_text(file, "prompt")),
)
