"""Evaluate a checkpoint by LongPPL, alone or beside a second one, to ``reports/<name>/``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.markup import escape
from rich.table import Table

from spkv_nas.artifacts.result_tables import LONGPPL
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.console import out, print_path, say
from spkv_nas.base.distributed import gathered, on_main, own_share
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Progress, Reporter
from spkv_nas.base.special_tokens import tokens_before
from spkv_nas.base.version import environment
from spkv_nas.contrib.defaults import LONGPPL_LENGTH
from spkv_nas.contrib.evaluate.longppl.options import LongPPLOptions
from spkv_nas.contrib.evaluate.longppl.reading import (
    Criterion,
    LongText,
    Reading,
    Spans,
    key_spans,
    read,
    stretches,
)
from spkv_nas.contrib.evaluate.longppl.table import longppl_table
from spkv_nas.data.heldout import heldout_share
from spkv_nas.data.pieces import piece_size
from spkv_nas.data.sources import Document, documents, heldout
from spkv_nas.evaluation.micro_batch import check_positions
from spkv_nas.evaluation.samples import read_samples, sample_file, write_samples
from spkv_nas.model.transformers_logging import quiet_transformers
from spkv_nas.stages.checkpoints import check_pair, hard, identity, load, origin
from spkv_nas.stages.checks import check
from spkv_nas.stages.printing import change, percent, say_sample_count, with_error
from spkv_nas.stages.result import Result
from spkv_nas.stages.sized_model import model_name, result_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Line = dict[str, Any]


@dataclass(frozen=True)
class LongPPLResult:
    """Result of LongPPL.

    Attributes:
        name: name of the results.
        rows: table of ``table``.
        withheld: reason why values are withheld, by domain.
        folder: folder of the table.
        samples: folder of key tokens and NLL by text.
    """

    name: str
    rows: pd.DataFrame
    withheld: dict[str, str]
    folder: Path
    samples: Path


def longppl(options: LongPPLOptions, reporter: Reporter = SILENT) -> LongPPLResult:
    """Measure LongPPL of a checkpoint and write ``reports/<name>/longppl.csv``; details by text go to ``runs/``.

    Raises:
        UserError: no text is long enough, or something cannot be loaded.
    """
    quiet_transformers(reporter)
    check(options)
    name = options.name or result_name(options.model, options.folders)
    folder, samples = options.folders.report_dir(name), options.folders.run_dir(name) / "longppl"
    check_pair(options.model, options.against)
    # Find the key tokens
    evaluator = options.evaluator or options.against or options.model
    length, criterion = _sizes(options, [evaluator, options.model, *([options.against] if options.against else [])])
    texts, spans, evaluator_record = _keys(options, evaluator, length, criterion, samples, reporter)
    # Score them by each checkpoint
    sources = [(options.model, options.tau), *([(options.against, None)] if options.against else [])]
    results = [_readings(options, *source, texts, spans, length, samples, reporter) for source in sources]
    rows, withheld = longppl_table(texts, *(readings for readings, _ in results))
    # Write the table with its origin
    record = {
        **results[0][1],
        "against": results[1][1] if options.against else None,
        "evaluator": evaluator_record,
        **asdict(criterion),
        "block_size": length,
        "data": options.data or "held-out text of the embedded models",
        "withheld": withheld,
        "environment": environment(),
    }
    on_main(lambda: LONGPPL.write(folder, rows, record, reporter))
    return LongPPLResult(name, rows, withheld, folder, samples)


def _sizes(options: LongPPLOptions, sources: Sequence[str]) -> tuple[int, Criterion]:
    """Return (tokens per text, criterion of key tokens), by default from the maximum length of all models.

    Raises:
        UserError: the short context leaves nothing of a text.
    """
    from spkv_nas.model.checkpoint import read_size

    # Default length of texts: at most what every model was made for
    length = options.block_size
    if length is None:
        max_positions = (read_size(source).positions for source in sources)
        length = min([LONGPPL_LENGTH, *(positions for positions in max_positions if positions is not None)])
    return length, Criterion.of(length, options.short_context, options.stride, options.alpha, options.beta)


def _keys(
    options: LongPPLOptions, source: str, length: int, criterion: Criterion, samples: Path, reporter: Reporter
) -> tuple[list[LongText], list[Spans], dict[str, Any]]:
    """Return the texts, the spans of their key tokens, and the evaluator's origin; finished spans are reused."""
    from spkv_nas.model.config_section import gate_config
    from spkv_nas.model.modes import evaluation_mode, gate_mode

    # Load the evaluator and the texts
    loaded = model, tokenizer = load(options, source, reporter)
    check_positions(model, length, "--block-size")
    texts = _texts(options, tokenizer, length, criterion.short)
    reporter.detail(f"{len(texts)} texts of at most {length} tokens")
    answer_identity = identity(source, loaded, f"open {criterion} {_hash(texts)}{_opening(tokenizer)}")

    def line(text: LongText, number: int) -> Line:
        spans = key_spans(*loaded, text.text, criterion)
        return {"text": number, "name": text.name, "spans": spans, "keys": [text.text[a:b] for a, b in spans]}

    # Find the key tokens, with open gates
    open_gates = nullcontext() if gate_config(model) is None else gate_mode(model, "open")
    with evaluation_mode(model), open_gates, reporter.bar("finding key tokens") as progress:
        lines = _lines(sample_file(samples, "keys", answer_identity), texts, line, progress)
    spans = [[(start, end) for start, end in row["spans"]] for row in lines]
    return texts, spans, {**origin(source, model, None), "tau": None}


def _readings(
    options: LongPPLOptions,
    source: str,
    tau: float | None,
    texts: list[LongText],
    spans: list[Spans],
    length: int,
    samples: Path,
    reporter: Reporter,
) -> tuple[list[Reading], dict[str, Any]]:
    """Return (a checkpoint's readings of the texts, its origin); finished readings are reused."""
    from spkv_nas.model.modes import evaluation_mode

    # Load the checkpoint
    loaded = model, tokenizer = load(options, source, reporter)
    check_positions(model, length, "--block-size")
    origin_record = origin(source, model, tau)
    answer_identity = identity(
        source, loaded, f"{origin_record['tau']} {_hash(texts)} {_hash(spans)}{_opening(tokenizer)}"
    )

    def line(text: LongText, number: int) -> Line:
        return {"text": number, "name": text.name, **asdict(read(*loaded, text.text, spans[number]))}

    # Read every text, with hard gates
    with evaluation_mode(model), hard(model, tau), reporter.bar(f"scoring with {model_name(source)}") as progress:
        lines = _lines(sample_file(samples, "nll", answer_identity), texts, line, progress)
    readings = [Reading(**{key: row[key] for key in Reading.__dataclass_fields__}) for row in lines]
    return readings, origin_record


def _lines(file: Path, texts: list[LongText], line: Callable[[LongText, int], Line], progress: Progress) -> list[Line]:
    """Read one line per text from the file, or compute and write them; must be called on all ranks."""
    if not on_main(file.is_file):
        share, local_lines = own_share(len(texts)), []
        for num_done, number in enumerate(share, 1):
            local_lines.append(line(texts[number], number))
            progress(num_done, len(share))
        lines = [row for part in gathered(local_lines) for row in part]
        on_main(lambda: write_samples(file, lines))
    return on_main(partial(read_samples, file))


def _texts(options: LongPPLOptions, tokenizer: PreTrainedTokenizerBase, length: int, short: int) -> list[LongText]:
    """Read the texts. Raises ``UserError`` if none is long enough."""
    if options.max_tokens is not None and options.max_tokens <= short:
        raise UserError(
            f"--max-tokens {options.max_tokens} must exceed the short context of {short} tokens\n"
            "use a larger --max-tokens or a smaller --short-context"
        )
    texts = stretches(_documents(options, length), tokenizer, length, short, options.max_tokens)
    if not texts:
        raise UserError(
            f"no document is longer than the short context of {short} tokens\n"
            "use longer text or a smaller --short-context"
        )
    return texts


def _documents(options: LongPPLOptions, length: int) -> Iterator[Document]:
    """Return the user's documents, or the embedded models' held-out ones.

    The latter are sorted by hash, so that the first ones are a random sample.
    """
    from spkv_nas.training.recipe import Recipe

    if options.data:
        return documents(options.data, Path(), piece=piece_size(length))
    data = Recipe.read(EMBEDDED / "recipe.yaml").data
    share = heldout_share(data, EMBEDDED)
    all_documents = documents(data.sources, EMBEDDED, piece=piece_size(data.block_size))
    return iter(
        sorted((document for document in all_documents if heldout(document, share)), key=lambda document: document.id)
    )


def _opening(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the part of an identity that says how sequences begin; empty where they begin with the text."""
    opening = tokens_before(tokenizer)
    return f" opening {opening}" if opening else ""


def _hash(value: object) -> str:
    """Return 16 hex digits that identify a value by its ``repr``."""
    return sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]


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


def run(options: LongPPLOptions, reporter: Reporter) -> Result:
    """Run the command."""
    return Result(longppl(options, reporter), show)
