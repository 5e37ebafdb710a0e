"""Evaluate a checkpoint by LongPPL, to ``reports/<name>/``, alone or beside another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from spkv_nas.artifacts.defaults import LONGPPL_ALPHA, LONGPPL_BETA, LONGPPL_LENGTH, LONGPPL_SHORT
from spkv_nas.artifacts.result_tables import LONGPPL
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.distributed import gathered, on_main, own_share
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Progress, Reporter
from spkv_nas.base.version import environment
from spkv_nas.data.heldout import heldout_share
from spkv_nas.data.pieces import piece_size
from spkv_nas.data.sources import Document, documents, heldout
from spkv_nas.evaluation.longppl.reading import Criterion, LongText, Reading, Spans, key_spans, read, stretches
from spkv_nas.evaluation.longppl.table import longppl_table
from spkv_nas.evaluation.samples import read_samples, sample_file, write_samples
from spkv_nas.stages.checks import check
from spkv_nas.stages.common import check_positions, model_name, quiet_transformers, result_name
from spkv_nas.stages.eval_modes import check_pair, hard, identity, load, origin, with_open_gates
from spkv_nas.stages.options import EvaluateOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PART = 4  # of a text the short context is at most a fourth, and the stride is a fourth of that

Line = dict[str, Any]


@dataclass(frozen=True)
class LongPPLResult:
    """What LongPPL gave: its name, the table of ``evaluation.longppl.table``, why values are withheld, by domain, the
    table's folder, and that of key tokens and NLL by text.
    """

    name: str
    rows: pd.DataFrame
    withheld: dict[str, str]
    folder: Path
    samples: Path


def longppl(options: EvaluateOptions, reporter: Reporter = SILENT) -> LongPPLResult:
    """LongPPL of a checkpoint, written to ``reports/<name>/longppl.csv``; what is known by text is in ``runs/``.

    Raises:
        UserError: options that do not go together, no text that is long enough, or what cannot be loaded.
    """
    quiet_transformers(reporter)
    check(options)
    assert options.model is not None
    name = options.name or result_name(options.model)
    folder, samples = options.place.report_dir(name), options.place.run_dir(name) / "longppl"
    check_pair(options.model, options.against)
    evaluator = options.evaluator or options.against or options.model
    length, criterion = _sizes(options, [evaluator, options.model, *([options.against] if options.against else [])])
    texts, spans, about = _keys(options, evaluator, length, criterion, samples, reporter)
    sources = [(options.model, options.tau), *([(options.against, None)] if options.against else [])]
    found = [_readings(options, *source, texts, spans, length, samples, reporter) for source in sources]
    rows, withheld = longppl_table(texts, *(readings for readings, _ in found))
    told = {
        **found[0][1],
        "against": found[1][1] if options.against else None,
        "evaluator": about,
        **asdict(criterion),
        "block_size": length,
        "data": options.data or "held-out text of the embedded models",
        "withheld": withheld,
        "environment": environment(),
    }
    on_main(lambda: LONGPPL.write(folder, rows, told))
    return LongPPLResult(name, rows, withheld, folder, samples)


def _sizes(options: EvaluateOptions, sources: Sequence[str]) -> tuple[int, Criterion]:
    """(tokens of a text, what is key in it): as asked for, or what all models are made for.

    Raises:
        UserError: the short context leaves nothing of a text.
    """
    from spkv_nas.model.checkpoint import read_size

    length = options.block_size
    if length is None:
        known = (read_size(source).positions for source in sources)
        length = min([LONGPPL_LENGTH, *(positions for positions in known if positions is not None)])
    short = options.short or max(1, min(LONGPPL_SHORT, length // _PART))
    if short >= length:
        raise UserError(
            f"a short context of {short} tokens leaves nothing of texts of {length}\n"
            "give a smaller --short, or a larger --block-size"
        )
    criterion = Criterion(
        short=short,
        stride=options.stride or max(1, short // _PART),
        alpha=LONGPPL_ALPHA if options.alpha is None else options.alpha,
        beta=LONGPPL_BETA if options.beta is None else options.beta,
    )
    return length, criterion


def _keys(
    options: EvaluateOptions, source: str, length: int, criterion: Criterion, samples: Path, reporter: Reporter
) -> tuple[list[LongText], list[Spans], dict[str, Any]]:
    """The texts, the spans of their key tokens, and which evaluator found them; what is known already is read."""
    from spkv_nas.model.modes import evaluation_mode

    loaded = model, tokenizer = load(options, source, reporter)
    check_positions(model, length, "--block-size")
    texts = _texts(options, tokenizer, length, criterion.short)
    reporter.detail(f"{len(texts)} texts of at most {length} tokens")
    whose = identity(source, loaded, f"open {criterion} {_hash(texts)}")

    def line(text: LongText, number: int) -> Line:
        spans = key_spans(*loaded, text.text, criterion)
        return {"text": number, "name": text.name, "spans": spans, "keys": [text.text[a:b] for a, b in spans]}

    with evaluation_mode(model), with_open_gates(model), reporter.bar("finding key tokens") as progress:
        lines = _lines(sample_file(samples, "keys", whose), texts, line, progress)
    spans = [[(start, end) for start, end in one["spans"]] for one in lines]
    return texts, spans, {**origin(source, model, None), "tau": None}


def _readings(
    options: EvaluateOptions,
    source: str,
    tau: float | None,
    texts: list[LongText],
    spans: list[Spans],
    length: int,
    samples: Path,
    reporter: Reporter,
) -> tuple[list[Reading], dict[str, Any]]:
    """(what a checkpoint makes of the texts, where that comes from)."""
    from spkv_nas.model.modes import evaluation_mode

    loaded = model, _ = load(options, source, reporter)
    check_positions(model, length, "--block-size")
    about = origin(source, model, tau)
    whose = identity(source, loaded, f"{about['tau']} {_hash(texts)} {_hash(spans)}")

    def line(text: LongText, number: int) -> Line:
        return {"text": number, "name": text.name, **asdict(read(*loaded, text.text, spans[number]))}

    with evaluation_mode(model), hard(model, tau), reporter.bar(f"reading with {model_name(source)}") as progress:
        lines = _lines(sample_file(samples, "nll", whose), texts, line, progress)
    readings = [Reading(**{key: one[key] for key in Reading.__dataclass_fields__}) for one in lines]
    return readings, about


def _lines(file: Path, texts: list[LongText], line: Callable[[LongText, int], Line], progress: Progress) -> list[Line]:
    """A line of each text, in their order: read from the file, or made and written to it; collective."""
    if not on_main(file.is_file):
        share, own = own_share(len(texts)), []
        for done, number in enumerate(share, 1):
            own.append(line(texts[number], number))
            progress(done, len(share))
        lines = [one for part in gathered(own) for one in part]
        on_main(lambda: write_samples(file, lines))
    return on_main(partial(read_samples, file))


def _texts(options: EvaluateOptions, tokenizer: PreTrainedTokenizerBase, length: int, short: int) -> list[LongText]:
    """The texts to read. Raises ``UserError``: none is long enough."""
    if options.max_tokens is not None and options.max_tokens <= short:
        raise UserError(
            f"--max-tokens {options.max_tokens} leaves nothing beyond the short context of {short} tokens\n"
            "give a larger one, or a smaller --short"
        )
    texts = stretches(_documents(options, length), tokenizer, length, short, options.max_tokens)
    if not texts:
        raise UserError(
            f"no document has more than {short} tokens, the short context: give longer text, or a smaller --short"
        )
    return texts


def _documents(options: EvaluateOptions, length: int) -> Iterator[Document]:
    """Those of a text of one's own, or the held-out ones of the embedded models, by hash: the first are a sample."""
    from spkv_nas.training.recipe import Recipe

    if options.data:
        return documents(options.data, Path(), piece=piece_size(length))
    data = Recipe.read(EMBEDDED / "recipe.yaml").data
    share = heldout_share(data, EMBEDDED)
    found = documents(data.sources, EMBEDDED, piece=piece_size(data.block_size))
    return iter(sorted((one for one in found if heldout(one, share)), key=lambda one: one.id))


def _hash(what: object) -> str:
    return sha256(repr(what).encode("utf-8", "surrogatepass")).hexdigest()[:16]
