"""Evaluate a checkpoint by LongPPL, alone or beside a second one, to ``reports/<name>/``."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.result_tables import LONGPPL
from spkv_nas.base import arrays, assets, console, distributed, errors, special_tokens, statistics
from spkv_nas.base.progress import SILENT, Progress, Reporter
from spkv_nas.contrib.evaluate import samples
from spkv_nas.contrib.evaluate.longppl.options import MAX_LENGTH, LongPPLOptions
from spkv_nas.contrib.evaluate.longppl.reading import (
    Criterion,
    LongText,
    Spans,
    key_spans,
    read,
    stretches,
)
from spkv_nas.data.sources import Document, documents, heldout, only_texts
from spkv_nas.data.splits import heldout_share
from spkv_nas.data.tokenizer import piece_size
from spkv_nas.evaluation import continuations, micro_batch
from spkv_nas.model import config_section, modes
from spkv_nas.model.checkpoint import read_size
from spkv_nas.stages import commands, printing, sized_model, subject
from spkv_nas.training.recipe import Recipe

ALL = "all"
MIN_KEYS = 100  # minimum number of key tokens to report a perplexity


@dataclass(frozen=True)
class LongPPLResult(samples.SampledTable):
    """Table of ``table``, with the reason why values are ``withheld``, by domain."""

    withheld: dict[str, str]


def run(options: LongPPLOptions, reporter: Reporter = SILENT) -> commands.Result:
    """Measure LongPPL of a checkpoint: ``reports/<name>/longppl.csv``, with details by text in ``runs/``."""
    name = options.name or sized_model.result_name(options.model, options.folders)
    folder = options.folders.report_dir(name)
    sample_folder = options.folders.run_dir(name) / "longppl"
    subject.check_pair(options.model, options.against)
    # Find the key tokens in texts of at most the length that every model was made for
    evaluator = options.evaluator or options.against or options.model
    length = options.block_size or _longest_text(evaluator, options.model, options.against)
    criterion = Criterion.of(length, options.short_context)
    texts, spans, evaluator_record = _keys(
        options, evaluator, length, criterion, sample_folder, reporter
    )

    def score(source: str, tau: float | None) -> tuple[pd.DataFrame, dict[str, Any]]:
        """Return (a checkpoint's readings of the texts, a row each; its origin); finished readings are reused."""
        checkpoint = samples.Checkpoint.load(options, source, tau, reporter)
        model = checkpoint.model
        tokenizer = checkpoint.tokenizer
        origin = checkpoint.origin
        micro_batch.check_positions(model, length, "--context")
        identity = checkpoint.identity(f"{origin['tau']} {_depends_on(tokenizer, texts, spans)}")

        def read_text(number: int, text: str) -> dict[str, object]:
            return asdict(read(model, tokenizer, text, spans[number]))

        # Read every text, with hard gates
        title = f"scoring with {sized_model.model_name(source)}"
        with modes.evaluation_mode(model), checkpoint.hard(), reporter.bar(title) as bar:
            compute = partial(_by_text, texts, read_text, bar)
            lines = samples.kept_samples(sample_folder, "nll", identity, compute)
        return pd.DataFrame(lines), origin

    # Score them by each checkpoint
    readings, origin = score(options.model, options.tau)
    against_readings = None
    against_origin = None
    if options.against:
        against_readings, against_origin = score(options.against, None)
    rows, withheld = longppl_table(texts, readings, against_readings)
    # Write the table with its origin
    record = {
        **origin,
        "against": against_origin,
        "evaluator": evaluator_record,
        **asdict(criterion),
        "block_size": length,
        "data": options.data or "held-out text of the embedded models",
        "withheld": withheld,
    }
    distributed.on_main(lambda: LONGPPL.write(folder, rows, record, reporter))
    return commands.Result(LongPPLResult(name, rows, folder, sample_folder, withheld), show)


def _longest_text(*sources: str | None) -> int:
    """Return the length that every checkpoint was made for, at most ``MAX_LENGTH``."""
    positions = [read_size(source).positions for source in sources if source is not None]
    return min([MAX_LENGTH, *(number for number in positions if number is not None)])


def _keys(
    options: LongPPLOptions,
    source: str,
    length: int,
    criterion: Criterion,
    sample_folder: Path,
    reporter: Reporter,
) -> tuple[list[LongText], list[Spans], dict[str, Any]]:
    """Return the texts, the spans of their key tokens, and the evaluator's origin; finished spans are reused."""
    # Load the evaluator and the texts
    evaluator = samples.Checkpoint.load(options, source, None, reporter)
    model = evaluator.model
    tokenizer = evaluator.tokenizer
    micro_batch.check_positions(model, length, "--context")
    texts = _texts(options, tokenizer, length, criterion.short)
    reporter.detail(f"{len(texts)} texts of at most {length} tokens")
    identity = evaluator.identity(f"open {criterion} {_depends_on(tokenizer, texts)}")

    def find(number: int, text: str) -> dict[str, object]:
        spans = key_spans(model, tokenizer, text, criterion)
        return {"spans": spans, "keys": [text[start:end] for start, end in spans]}

    # Find the key tokens, with open gates
    has_gates = config_section.gate_config(model) is not None
    open_gates = modes.gate_mode(model, "open") if has_gates else nullcontext()
    title = "finding key tokens"
    with modes.evaluation_mode(model), open_gates, reporter.bar(title, "texts") as bar:
        compute = partial(_by_text, texts, find, bar)
        lines = samples.kept_samples(sample_folder, "keys", identity, compute)
    spans = [[(start, end) for start, end in row["spans"]] for row in lines]
    return texts, spans, {**evaluator.origin, "tau": None}


def _by_text(
    texts: list[LongText], compute: Callable[[int, str], dict[str, Any]], progress: Progress
) -> list[dict[str, Any]]:
    """Return a record per text, of what ``compute`` returns for its number and content; must be called on all ranks."""

    def run(part: range) -> list[dict[str, Any]]:
        lines = []
        for number in part:
            text = texts[number]
            lines.append({"text": number, "name": text.name, **compute(number, text.text)})
        return lines

    return continuations.in_batches(run, len(texts), 1, progress)


def _texts(
    options: LongPPLOptions, tokenizer: PreTrainedTokenizerBase, length: int, short: int
) -> list[LongText]:
    """Read the texts. Raises ``UserError`` if none is long enough."""
    if options.max_tokens is not None and options.max_tokens <= short:
        raise errors.UserError(
            f"--max-tokens {options.max_tokens} must exceed the short context of {short} tokens\n"
            "use a larger --max-tokens or a smaller --short-context"
        )
    texts = stretches(_documents(options, length), tokenizer, length, short, options.max_tokens)
    if not texts:
        raise errors.UserError(
            f"no document is longer than the short context of {short} tokens\n"
            "use longer text or a smaller --short-context"
        )
    return texts


def _documents(options: LongPPLOptions, length: int) -> Iterator[Document]:
    """Return the user's documents, or the embedded models' held-out ones in the random order of their hashes."""
    if options.data:
        return only_texts(documents(options.data, Path(), piece=piece_size(length)), "LongPPL")
    data = Recipe.read(assets.EMBEDDED / "recipe.yaml").data
    share = heldout_share(data, assets.EMBEDDED)
    all_documents = documents(data.sources, assets.EMBEDDED, piece=piece_size(data.block_size))
    held_out = (document for document in all_documents if heldout(document, share))
    return iter(sorted(held_out, key=lambda document: document.id))


def _depends_on(tokenizer: PreTrainedTokenizerBase, *values: object) -> str:
    """Return what identifies values by their ``repr``, and how sequences begin unless with the text."""
    texts = [repr(value).encode("utf-8", "surrogatepass") for value in values]
    hashes = " ".join(sha256(text).hexdigest()[:16] for text in texts)
    opening = special_tokens.tokens_before(tokenizer)
    return f"{hashes} opening {opening}" if opening else hashes


def show(result: LongPPLResult) -> None:
    """Print LongPPL by domain, with the other checkpoint if there is one."""
    has_baseline = result.rows["against_ppl"].notna().any()
    columns = ["text", "key tokens", "LongPPL", "PPL", "density %"]
    if has_baseline:
        columns += ["against", "density %", "difference %"]
    grid = console.Table(*columns, title=console.escape(result.name))
    for row in result.rows.itertuples():
        cells = [
            console.escape(row.domain),
            f"{row.num_keys:,} of {row.num_tokens:,}",
            samples.with_error(row.longppl, row.standard_error),
            f"{row.ppl:.3f}",
            samples.percent(row.density),
        ]
        if has_baseline:
            cells += [
                samples.with_error(row.against),
                samples.percent(row.against_density),
                printing.change(row.difference_percent, row.difference_standard_error),
            ]
        grid.add_row(*cells)
    console.out.print(grid)
    samples.say_sample_count(result.rows["num_documents"], "documents")
    for domain, reason in result.withheld.items():
        console.say(f"{domain}: {reason}")
    console.print_path("values", result.folder / "longppl.csv")
    console.print_path("key tokens and NLL by text", result.samples)


def longppl_table(
    texts: Sequence[LongText], readings: pd.DataFrame, against: pd.DataFrame | None = None
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Tabulate readings of one checkpoint, or of two on the same key tokens, over all texts and by domain.

    Readings have a row per text, with the fields of ``Reading``. Standard errors have documents as clusters.
    ``difference_percent`` is the relative difference of LongPPL to that of the other checkpoint, with the error of the
    difference by document. Also returns the reasons why values are withheld, by domain.
    """
    document = np.array([text.document for text in texts])
    domain_of = np.array([text.domain for text in texts])
    domains = sorted(set(domain_of.tolist()))
    rows = []
    withheld = {}
    for domain in [ALL, *(domains if len(domains) > 1 else [])]:
        chosen = (domain_of == domain) | (domain == ALL)
        others = None if against is None else against[chosen]
        rows.append((domain, *_cells(document[chosen], readings[chosen], others)))
        # Withhold numbers from too few key tokens
        num_keys = readings["num_keys"][chosen].sum()
        if num_keys < MIN_KEYS:
            withheld[domain] = (
                f"LongPPL is not reported: found {num_keys} key tokens, but at least {MIN_KEYS} "
                "are needed"
            )
    return pd.DataFrame(rows, columns=LONGPPL.header), withheld


def _cells(
    documents: arrays.Int, readings: pd.DataFrame, against: pd.DataFrame | None
) -> tuple[int | float, ...]:
    """Return the columns of ``LONGPPL`` after "domain"; ``documents`` [texts] are those of the readings."""
    keys_by_document = readings["num_keys"].groupby(documents).sum()
    num_keys = int(keys_by_document.sum())
    has_keys = keys_by_document > 0

    def key_mean(totals: pd.Series) -> tuple[float, float]:
        """Return the mean over key tokens of sums [texts], and its standard error; NaN for too few."""
        if num_keys < MIN_KEYS:
            return math.nan, math.nan
        mean = float(totals.sum() / num_keys)
        residuals = totals.groupby(documents).sum() - mean * keys_by_document
        squares = (residuals[has_keys] ** 2).sum()
        return mean, float(statistics.clustered_error(squares, int(has_keys.sum()), num_keys))

    def ppl_and_density(part: pd.DataFrame) -> tuple[float, float]:
        """Return the perplexity of all tokens, and the density."""
        num_tokens = part["num_tokens"]
        density = (part["density"] * num_tokens).sum(skipna=False) / num_tokens.sum()
        ppl = math.exp(part["total"].sum() / num_tokens.sum())
        return ppl, float(density)

    mean, error = key_mean(readings["key_total"])
    counts = (len(keys_by_document), int(readings["num_tokens"].sum()), num_keys)
    cells = (*counts, math.exp(mean), math.exp(mean) * error, *ppl_and_density(readings))
    if against is None:
        nothing = (math.nan,) * 5
        return *cells, *nothing
    # Add the other checkpoint and the difference
    log_ratio, error = key_mean(readings["key_total"] - against["key_total"])
    percent = 100.0 * math.exp(log_ratio)
    against_mean, _ = key_mean(against["key_total"])
    difference = (percent - 100.0, percent * error)
    return *cells, math.exp(against_mean), *ppl_and_density(against), *difference
