"""Read one row of a verdict or a critical budget, with its record, as one object that every sentence is made from.

A sentence that takes its loss, its number of samples, its margin and its answer from here cannot mix those of several
candidates, criteria or commands. The terminal, the page and the model card use the same words::

    first = measurements(rows, record)[0]
    first.finding  # "+0.709 %, at most +0.96 %, on 197 documents"
    first.conclusion  # "passes 1 % (nll) at a risk of 5 %"
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from spkv_nas.artifacts.displacement import CLIP, Displacement

Answer = Literal["passes", "fails", "open"]
_VERBS: dict[str, str] = {"passes": "passes", "fails": "fails", "open": "is open at"}
_DIGITS = 3  # significant digits of a loss
_MOST_DECIMALS = 4  # decimals of a loss, at most
SAMPLES = "samples"  # what a sample is called where that was not recorded


@dataclass(frozen=True)
class PositionLoss:
    """NLL in nats per token of tokens that have ``start`` to ``end`` - 1 tokens of their own document before them."""

    start: int
    end: int
    num_tokens: int
    nll: float
    dense_nll: float

    @property
    def loss(self) -> float:
        """Return the rise of the NLL in percent of the dense model's."""
        return 100.0 * (self.nll / self.dense_nll - 1.0)


@dataclass(frozen=True)
class Measurement:
    """Loss of one candidate by one criterion, and what a test concluded from it.

    ``low`` and ``high`` are the ends of an interval of the loss that holds at any time; NaN: not known. A level is the
    largest p-value at which the candidate passes, or fails; 0: that was not tested; NaN: not recorded.
    """

    candidate: str
    criterion: str
    answer: Answer  # by this criterion
    margin: float
    unit: str  # of margin and loss
    loss: float  # positive: worse than the dense model; NaN without samples
    low: float
    high: float
    num_samples: int
    noun: str  # what a sample is, in the plural
    more_samples: int | None  # estimate of how many more would decide; None: unknown
    num_available: float  # samples that the text gives; NaN: not recorded
    # Of a wrong pass, and of a wrong failure, of all candidates together; NaN: not recorded
    risk: float
    against: str  # the dense model
    passes_level: float = math.nan
    fails_level: float = math.nan
    # Samples that lose more than the test counts; None: it counts all of a loss
    num_clipped: int | None = None
    # KV cache, in percent of full attention's, at ``context`` tokens; NaN: not recorded
    kv_cache_percent: float = math.nan
    context: int | None = None  # tokens of a block of the text; None: not recorded
    # Of the same documents; empty: not recorded, or another criterion
    by_position: tuple[PositionLoss, ...] = ()
    displacement: Displacement | None = None  # of the same passes; None: not measured
    note: str = ""  # what the criterion says besides
    source: Path | None = None  # the table; None for one in memory

    @property
    def limit(self) -> str:
        """Return the margin with its unit and criterion, such as "1 % (nll)"."""
        return f"{self.margin:g} {self.unit} ({self.criterion})"

    @property
    def samples(self) -> str:
        """Return how many samples were measured, such as "197 documents"."""
        return f"{self.num_samples:,} {self.noun}"

    @property
    def interval(self) -> str:
        """Return the interval in words: "+0.2 to +0.9", with one end "at most +0.9", without any "not known yet"."""
        return interval_words(self.low, self.high)

    @property
    def finding(self) -> str:
        """Return the loss with its interval, and what it was measured on, in words."""
        if math.isnan(self.loss):
            return f"not measured, on {self.samples}"
        loss = f"{loss_text(self.loss)} {self.unit}"
        bounds = [bound for bound in (self.low, self.high) if not math.isnan(bound)]
        if len(bounds) == 2:
            loss += f" (interval {self.interval} {self.unit})"
        elif bounds:
            loss += f", {self.interval} {self.unit}"
        return f"{loss}, on {self.samples}"

    @property
    def memory(self) -> str:
        """Return the KV cache in words, such as "11.9 % of the KV cache at 512 tokens"; "" if it is not recorded."""
        if math.isnan(self.kv_cache_percent):
            return ""
        where = "" if self.context is None else f" at {self.context:,} tokens"
        return f"{self.kv_cache_percent:.1f} % of the KV cache{where}"

    @property
    def conclusion(self) -> str:
        """Return the answer, the margin and the risk in words."""
        risk = "" if math.isnan(self.risk) else f" at a risk of {100 * self.risk:g} %"
        return f"{_VERBS[self.answer]} {self.limit}{risk}"


def displacement_words(measured: Iterable[Measurement]) -> list[str]:
    """Return how far a candidate's predictions are from the dense model's, in words; empty if that was not measured.

    Clipped samples are named, too.
    """
    words = []
    for each in measured:
        if each.num_clipped:
            most = f"{CLIP * each.margin:g} {each.unit}"
            words.append(
                f"{each.num_clipped:,} of {each.samples} lose more than {most} and count as that"
            )
        if each.displacement is not None:
            words.append(each.displacement.words)
    return words


def note_words(measured: Iterable[Measurement]) -> list[str]:
    """Return what the criteria say about a candidate besides its losses."""
    return [f"{each.criterion}: {each.note}" for each in measured if each.note]


def measurements(
    rows: pd.DataFrame, record: Mapping[str, Any], source: Path | None = None
) -> list[Measurement]:
    """Read all rows of a table of ``verdict`` or ``critical-budget``; missing keys of the record are unknown."""
    nouns = record.get("nouns", {})
    available = record.get("num_samples", {})
    risk = record.get("risk")
    layouts = record.get("layouts", {})
    memory = {name: recorded.get("kv_cache_percent") for name, recorded in layouts.items()}
    return [
        Measurement(
            candidate=str(row["candidate"]),
            criterion=str(row["criterion"]),
            answer=row["answer"],
            margin=float(row["margin"]),
            unit=str(row["unit"]),
            loss=float(row["loss"]),
            low=float(row["low"]),
            high=float(row["high"]),
            num_samples=int(row["num_samples"]),
            noun=str(nouns.get(row["criterion"], SAMPLES)),
            more_samples=_whole(row["more_samples"]),
            num_available=float(available.get(row["criterion"], math.nan)),
            risk=_known(risk),
            against=str(record.get("against", "the dense model")),
            passes_level=_known(row.get("passes_level")),
            fails_level=_known(row.get("fails_level")),
            num_clipped=_whole(row.get("num_clipped")),
            kv_cache_percent=_known(memory.get(row["candidate"])),
            context=record.get("context"),
            by_position=_by_position(row, record),
            displacement=Displacement.of_row(row),
            note=record.get("notes", {}).get(row["candidate"], {}).get(row["criterion"], ""),
            source=source,
        )
        for row in rows.to_dict("records")
    ]


def _known(number: float | None) -> float:
    """Return a number that was recorded; NaN if it was not."""
    return math.nan if number is None else float(number)


def _whole(number: float | None) -> int | None:
    """Return a whole number of a table; None for a gap."""
    return None if number is None or pd.isna(number) else int(number)


def _by_position(row: Mapping[Any, Any], record: Mapping[str, Any]) -> tuple[PositionLoss, ...]:
    """Return the NLL by position of a row's candidate; empty for other criteria than the NLL."""
    parts = record.get("by_position", {}).get(row["candidate"], ())
    if row["criterion"] != "nll":
        return ()
    return tuple(
        PositionLoss(
            start=int(start),
            end=int(end),
            num_tokens=int(number),
            nll=float(nll),
            dense_nll=float(dense),
        )
        for start, end, number, nll, dense in parts
    )


def loss_text(loss: float) -> str:
    """Format a loss with its sign and three digits; NaN is a dash."""
    if math.isnan(loss):
        return "-"
    decimals = _DIGITS - 1
    if loss:
        decimals = min(max(_DIGITS - 1 - math.floor(math.log10(abs(loss))), 0), _MOST_DECIMALS)
    return f"{loss:+.{decimals}f}"


def interval_words(low: float, high: float) -> str:
    """Return an interval of a loss in words; an end that is NaN is not known."""
    if math.isnan(low) and math.isnan(high):
        return "not known yet"
    if math.isnan(low):
        return f"at most {loss_text(high)}"
    if math.isnan(high):
        return f"at least {loss_text(low)}"
    return f"{loss_text(low)} to {loss_text(high)}"
