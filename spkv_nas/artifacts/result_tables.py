"""Result tables of ``baselines``, ``evaluate`` and ``compare`` in ``reports/<name>/``.

Each is a CSV file plus a record of its origin, under the same name. Their columns are defined here, not beside the
measurements, because the report shows them even where the libraries that measured them are not installed. The table
of trained checkpoints, ``checkpoints.csv``, is stored beside ``comparison.csv``: one row per variant and seed, with
paths that are relative to the workspace root and use forward slashes, so that the workspace may be moved.
"""

import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
from pydantic import Field

from spkv_nas.artifacts.selection import Selection, write_selection
from spkv_nas.base import errors, files, limits, names, progress, records, replace, schema, version
from spkv_nas.base.tables import Column, read_table, write_csv

# Keys that do not describe the inputs
_RESULTS = (
    "environment",
    "alarm",
    "answers",
    "by_position",
    "inputs",
    "num_selection",
)
# Key of a record: the sentence that its numbers make no sense (``evaluation.alarms``)
ALARM = "alarm"
CHECKPOINTS = "checkpoints.csv"
RUN_RECORD = "run.json"  # in the folder of a finished branch
_COLUMNS = (Column("strategy"), Column("seed", "whole"), Column("hash"), Column("checkpoint"))


class AlarmRecord(schema.Recorded):
    """Key of all records of measured NLL that is read back."""

    alarm: str | None = None


class LeftOut(schema.Recorded):
    """Documents that a verdict left out because a layout was selected on them."""

    documents: int | None = None
    selected_by: list[str] = Field([])


class JudgedLayout(schema.Recorded):
    """Layout of a candidate of a verdict, so that its results are found by content."""

    heads: str  # ``Layout.words``
    window: int  # recent keys that a local head sees
    sinks: int = 0  # sink tokens of local heads
    # Whether the candidate is a checkpoint of its own, not the dense model's weights
    trained: bool = False
    # Memory at ``ResultRecord.context`` tokens, of full attention's
    kv_cache_percent: float | None = None


class ResultRecord(schema.Recorded):
    """Keys of the records beside result tables that are read back."""

    inputs: str | None = None
    model: str | None = None
    against: str | dict[str, Any] | None = None
    block_size: int | None = None
    context: int | None = None
    num_tokens: int | None = None
    num_documents: int | None = None
    limit: int | float | None = None
    evaluator: dict[str, Any] | None = None
    withheld: dict[str, str] | None = None
    candidates: dict[str, str] = Field({})
    answers: dict[str, Literal["passes", "fails", "open"]] = Field({})
    nouns: dict[str, str] = Field({})
    num_samples: dict[str, int] = Field({})
    risk: float | None = None
    left_out: LeftOut | None = None
    unrecorded: list[str] = Field([])
    # by candidate, rows of NLL by position: first and end, number of tokens, its NLL and the dense model's in nats
    by_position: dict[str, list[list[int | float]]] = Field({})
    layouts: dict[str, JudgedLayout] = Field({})
    windows: dict[str, int | None] = Field({})
    sinks: dict[str, int] | int | None = None
    effective_documents: float | None = None


def inputs_of(origin: Mapping[str, Any]) -> str:
    """Return the first 8 hexadecimal digits of the SHA-256 of a record without its results and environment."""
    content = {key: value for key, value in origin.items() if key not in _RESULTS}
    return hashlib.sha256(files.yaml_text(content).encode()).hexdigest()[:8]


def kept_name(name: str, inputs: str) -> str:
    """Return the name under which a file of other inputs is kept, such as ``verdict-1a2b3c4d.csv``."""
    return f"{Path(name).stem}-{inputs}{Path(name).suffix}"


def is_kept(file: Path) -> bool:
    """Return whether a file has such a name, so that a result of other inputs has taken its place."""
    return re.search(r"-[0-9a-f]{8}$", file.stem) is not None


def keep_earlier(
    folder: Path,
    new: Path,
    record: str,
    tables: Iterable[str],
    inputs: str,
    reporter: progress.Reporter,
) -> str | None:
    """Copy an earlier result that was made from other inputs to files beside it, such as ``verdict-1a2b3c4d.csv``.

    The result in ``folder`` has a record, such as ``verdict.yaml``, and other files, ``tables``. ``new`` is the folder
    of the files that replace them (``replacing``), made from ``inputs`` (``inputs_of``). Returns the inputs of the
    earlier result, or None if there is nothing to keep.
    """
    if not files.is_file(folder / record):
        return None
    # Identify the inputs of the earlier result
    content: dict[str, Any] | None = None  # of a damaged record, which is kept as it is
    with suppress(errors.UserError):
        content = records.read_unchecked(folder / record, "record", ResultRecord)
        content.pop("sha256", None)
    if content is None:
        earlier = hashlib.sha256((folder / record).read_bytes()).hexdigest()[:8]
    else:
        earlier = content.get("inputs") or inputs_of(content)
    if earlier == inputs:
        return None
    # Copy its files under names that end in the hash of these inputs
    copies = {name: kept_name(name, earlier) for name in (*tables, record)}
    copied = [
        Path(shutil.copyfile(folder / name, new / copies[name]))
        for name in tables
        if files.is_file(folder / name)
    ]
    if content is None:
        shutil.copyfile(folder / record, new / copies[record])
    else:
        records.write_record(new / copies[record], content, copied)
    reporter.announce(f"kept the earlier result, of other inputs, as {folder / copies[record]}")
    return earlier


@dataclass(frozen=True)
class ResultTable:
    """A table and its record, ``NAME.csv`` and ``NAME.yaml``, with the columns that are read back."""

    name: str
    columns: tuple[Column, ...] = ()

    @property
    def header(self) -> list[str]:
        """Return the names of the columns."""
        return [column.name for column in self.columns]

    def write(
        self,
        folder: Path,
        rows: pd.DataFrame,
        origin: Mapping[str, Any],
        reporter: progress.Reporter = progress.SILENT,
        selection: Selection | None = None,
    ) -> str | None:
        """Write the table, its record and the documents of its selection; return the inputs of an earlier one.

        The record is ``origin``, with the versions of this machine in its ``environment``.
        """
        environment = {**version.environment(), **origin.get("environment", {})}
        origin = {"inputs": inputs_of(origin), **origin, "environment": environment}
        table = f"{self.name}.csv"
        record = f"{self.name}.yaml"
        replace.settle(folder)  # so that an earlier result is complete
        with replace.replacing(folder) as new:
            write_csv(new / table, rows)
            records.write_record(new / record, origin)
            if selection is not None:
                write_selection(new, selection)
            return keep_earlier(folder, new, record, [table], origin["inputs"], reporter)

    def read(self, folder: Path) -> tuple[pd.DataFrame, dict[str, Any]] | None:
        """Read the rows, with missing values as NaN, and the record, empty if there is none; None without a table."""
        table = folder / f"{self.name}.csv"
        record = folder / f"{self.name}.yaml"
        if not table.is_file():
            return None
        rows = read_table(table, self.name, self.columns, others=True).reset_index(drop=True)
        if not record.is_file():
            return rows, {}
        return rows, records.read_record(record, self.name, ResultRecord)


def _number(
    name: str, low: float = 0.0, high: float = limits.MAX_SHOWN, default: str | None = None
) -> Column:
    return Column(name, "number", low=low, high=high, gaps=True, default=default)


def _paired(low: float) -> tuple[Column, ...]:
    """Return the columns of the comparison checkpoint, whose value is at least ``low``; empty without one."""
    return (
        _number("against", low),
        _number("against_density", high=1.0),
        _number("difference", -limits.MAX_SHOWN),
        _number("difference_standard_error"),
    )


# ``displacement.Displacement``, of the criterion that measured most documents; older files lack it
_DISPLACEMENT = (
    Column("num_compared", "whole", gaps=True, default=""),
    _number("kl_mean", default=""),
    _number("kl_standard_error", default=""),
    _number("kl_median", default=""),
    _number("kl_quantile", default=""),
    _number("same_top", high=100.0, default=""),
    _number("same_top_standard_error", default=""),
    _number("delta_p_mean", -100.0, 100.0, default=""),
    _number("delta_p_rms", high=100.0, default=""),
)
BASELINES = ResultTable(
    "baselines",
    (
        Column("method"),
        Column("sinks", "whole", gaps=True),
        _number("target_density", high=1.0),
        _number("density", high=1.0),
        _number("tau", high=1.0),
        _number("nll"),  # nats per token
        # Against the dense model, the first row, paired by document
        _number("delta_nll_percent", -100.0),
        _number("delta_nll_standard_error"),  # in percentage points
    ),
)
EVALUATION = ResultTable(
    "evaluation",
    (
        Column("checkpoint"),
        Column("variant"),  # trained by its run; empty without a run record
        _number("nll"),  # nats per token
        _number("density", high=1.0),
        _number("tau", high=1.0),
        Column("text"),  # hash of the blocks
        Column("num_tokens", "whole"),
        Column("num_documents", "whole"),
        _number("effective_documents"),
        Column("against"),  # checkpoint that the change is relative to; empty for a baseline
        _number("delta_nll_percent", -100.0),  # paired by document
        _number("delta_nll_standard_error"),  # in percentage points
    ),
)
RULER = ResultTable(
    "ruler",
    (
        Column("length", "whole"),
        Column("task"),
        Column("num_samples", "whole"),
        _number("score", high=1.0),
        _number("standard_error"),
        _number("floor", high=1.0),
        _number("density", high=1.0),
        *_paired(0.0),
    ),
)
TASKS = ResultTable(
    "tasks",
    (
        Column("task"),
        Column("metric"),
        Column("num_fewshot", "whole", gaps=True),
        Column("num_samples", "whole"),
        _number("value", -limits.MAX_SHOWN),
        _number("standard_error"),
        _number("density", high=1.0),
        *_paired(-limits.MAX_SHOWN),
    ),
)
LONGPPL = ResultTable(
    "longppl",
    (
        Column("domain"),
        Column("num_documents", "whole"),
        Column("num_tokens", "whole"),
        Column("num_keys", "whole"),
        _number("longppl"),
        _number("standard_error"),
        _number("ppl"),
        _number("density", high=1.0),
        _number("against"),
        _number("against_ppl"),
        _number("against_density", high=1.0),
        _number("difference_percent", -100.0),
        _number("difference_standard_error"),
    ),
)
AGREEMENT = ResultTable(
    "token-agreement",
    (
        Column("decoding"),  # of the dense model's continuations: greedy or sampled
        _number("temperature"),
        Column("num_documents", "whole"),
        Column("num_prompts", "whole"),
        Column("num_tokens", "whole"),
        _number("agreement", high=1.0),
        _number("agreement_standard_error"),
        _number("acceptance", high=1.0),
        _number("acceptance_standard_error"),
        Column("draft_tokens", "whole"),
        # Of the dense model, if the model drafts draft_tokens tokens for each pass
        _number("tokens_per_pass"),
        _number("tokens_per_pass_standard_error"),
    ),
)
SCORES = ResultTable(
    "zero-shot",
    (
        Column("strategy"),
        Column("hash"),  # of the layout; empty for full attention
        Column("num_global", "whole"),
        _number("density_percent"),
        # Memory for one block, of full attention's; older files lack it
        _number("kv_cache_percent", default=""),
        _number("coverage_percent"),
        _number("nll"),  # nats per token
        _number("delta_nll_percent", -100.0),  # against full attention, paired by document
        _number("delta_nll_standard_error"),  # in percentage points
        Column("heads", default=""),  # ``Layout.words``
        *_DISPLACEMENT,
    ),
)
VERDICT = ResultTable(
    "verdict",
    (
        Column("candidate"),
        Column("criterion"),
        Column("answer"),  # passes, fails or open, in this criterion
        _number("margin"),
        Column("unit"),  # of margin and loss
        _number("loss", -limits.MAX_SHOWN),  # positive: worse than the dense model
        _number("low", -limits.MAX_SHOWN),  # interval of the loss that holds at any time
        _number("high", -limits.MAX_SHOWN),
        Column("num_samples", "whole"),
        Column("more_samples", "whole", gaps=True),  # estimate of how many would decide
        _number("p_passes", high=1.0),  # anytime-valid
        _number("p_fails", high=1.0),
        # Samples that lose more than the test counts; older files lack it
        Column("num_clipped", "whole", gaps=True, default=""),
        *_DISPLACEMENT,
    ),
)
CRITICAL_BUDGET = ResultTable(
    "critical-budget",
    (
        Column("candidate", default=""),  # name of the layout that was looked at
        Column("num_global", "whole"),
        # The budget, if it is one of memory, in percent of full attention's
        _number("memory", high=100.0, default=""),
        Column("look", "whole"),  # from 1, in order
        # largest p-values at which it passes, and at which it fails; 0: not tested; older files lack them
        _number("passes_level", high=1.0, default=""),
        _number("fails_level", high=1.0, default=""),
        Column("result"),  # passes, fails or open, in all criteria
        *VERDICT.columns[1:],
        _number("kv_bytes"),
    ),
)
PROBE_PAIRS = ResultTable(
    "agreement",
    (
        Column("first"),
        Column("second"),
        Column("budget", "whole", low=1),
        *(_number(name, -1.0) for name in ("jaccard", "chance", "spearman", "transfer")),
        _number("mean_difference"),
    ),
)


@dataclass(frozen=True)
class TrainedModel:
    """One row of the table: a trained checkpoint."""

    strategy: str  # name of the variant in the comparison
    seed: int  # seed of its training
    hash: str  # hash of its layout; "" for full attention and SP-KV
    checkpoint: Path  # its folder


def write_checkpoints(folder: Path, models: Iterable[TrainedModel], root: Path) -> None:
    """Write the table of checkpoints to ``folder``, with paths relative to the workspace ``root``."""
    rows = [
        asdict(model) | {"checkpoint": model.checkpoint.relative_to(root).as_posix()}
        for model in models
    ]
    header = [column.name for column in _COLUMNS]
    write_csv(folder / CHECKPOINTS, pd.DataFrame(rows, columns=header))


def read_checkpoints(folder: Path, root: Path) -> list[TrainedModel]:
    """Read the table of checkpoints in ``folder``, whose paths are relative to, and in, the workspace ``root``."""
    rows = read_table(folder / CHECKPOINTS, "table of checkpoints", _COLUMNS)
    # Refuse paths that lead out of the workspace
    for line, path in rows["checkpoint"].items():
        leads_out = Path(path).is_absolute() or ".." in Path(path).parts
        if not path or leads_out or "\0" in path:
            raise errors.UserError(
                f"table of checkpoints {folder / CHECKPOINTS}, line {line}: '{path[:100]}' is not "
                "in the workspace"
            )
    return [
        TrainedModel(strategy, int(seed), short_hash, root / checkpoint)
        for strategy, seed, short_hash, checkpoint in rows.itertuples(index=False, name=None)
    ]


class RunOrigin(NamedTuple):
    """Recipe and variant (a baseline, or a layout's strategy; "" for a dense model) that produced a checkpoint."""

    recipe: str
    variant: str


def run_origin(checkpoint: Path) -> RunOrigin | None:
    """Return the recipe and variant of a checkpoint of ``runs/``; None if no recipe's run produced it."""
    file = checkpoint / RUN_RECORD
    if files.is_file(file):
        record = files.read_json(file, "run record")
        content = record.get("recipe")
        name = content.get("name") if isinstance(content, dict) else None
        if isinstance(name, str):
            recipe = names.check_name(name, f"{file}: the recipe's name")
            return RunOrigin(recipe, str(record.get("variant", "")))
    # Without a record, a dense model is recognised by its path: runs/RECIPE/FOLDER/final
    parts = checkpoint.absolute().parts[-4:]
    if len(parts) == 4 and parts[0] == "runs" and parts[3] == "final":
        return RunOrigin(parts[1], "")
    return None
