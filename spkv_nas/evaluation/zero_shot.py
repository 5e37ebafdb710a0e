"""Zero-shot score of layouts: the NLL of a checkpoint's own weights under each layout, without training.

A score costs seconds where retraining costs minutes to hours, so that a search can afford thousands. Layouts that
agree on their first layers share the hidden states up to there, which is exact: what enters a layer depends on the
layers before it alone. Finished scores are kept on disk by the layout's content hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spkv_nas.artifacts.comparison import FULL_ATTENTION
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.arrays import Array, read_arrays
from spkv_nas.base.distributed import on_main
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.records import write_record
from spkv_nas.base.replace import replacing
from spkv_nas.base.tables import write_csv
from spkv_nas.data.batches import block_tokens, num_own_blocks, run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import DocumentSums
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.model.attention import LayerState, attention_layers
from spkv_nas.model.checkpoint import checkpoint_hash
from spkv_nas.model.loss import token_nll
from spkv_nas.model.windows import full_attention, layout_windows

COLUMNS = (
    "strategy",
    "hash",
    "num_global",
    "density_percent",
    "coverage_percent",
    "nll",
    "delta_nll_percent",
    "delta_nll_standard_error",
)
_GROUP = 64  # layouts that run together; a killed run loses at most these

_LAYOUT = Array("layout", "text")  # in a finished score's file: what its hash is of

Windows = tuple[tuple[int, ...], ...]  # of every KV head, by layer


@dataclass
class Work:
    """What scoring took, added up: passes over the text, parts of one counted as such, and scores that were there."""

    passes: float = 0.0
    reused: int = 0


@torch.inference_mode()
def zero_shot(
    model: PreTrainedModel,
    layouts: Sequence[Layout | None],
    blocks: TokenBlocks,
    *,
    batch_size: int = 8,
    cache: Path | None = None,
    reporter: Reporter = SILENT,
    work: Work | None = None,
) -> list[DocumentNLL]:
    """NLL by document of ``blocks`` under ``model`` with each layout on its weights, in the order of ``layouts``.

    Collective: each process of torchrun runs its share of the blocks, process 0 alone reads and writes the cache.

    Args:
        model: dense, hybrid or SP-KV. Its own windows are lifted and its gates open meanwhile, so that a global head
            sees every key and a local one its window; it is left as it was.
        layouts: None is full attention.
        batch_size: blocks per forward pass; at most one hidden state per layer is kept of them.
        cache: folder of the finished scores of this model on this text (``cache_folder``); read and added to.
        reporter: told how many scores the cache has, and shows the others.
        work: added to.

    Raises:
        UserError: there is no text, or a layout is for another number of layers or KV heads.
    """
    if blocks.num_blocks == 0:
        raise UserError("there is no text to score layouts on")
    work = work or Work()
    with full_attention(model) as states:
        full = tuple(state.head_windows(gated=False) for state in states)
        wanted = [full if x is None else tuple(layout_windows(model, x)) for x in layouts]
        layout_of = dict(zip(wanted, layouts, strict=True))
        known = partial(read_score, cache, num_documents=len(blocks.documents))
        kept = on_main(lambda: {windows: known(layout) for windows, layout in layout_of.items()})
        scores = {windows: score for windows, score in kept.items() if score is not None}
        missing = sorted(layout_of.keys() - scores.keys())
        reporter.reused(len(scores), len(layout_of), "zero-shot scores")
        work.reused += len(scores)
        done, own = 0, num_own_blocks(blocks.num_blocks, batch_size)
        with reporter.bar("scoring without training") as progress:

            def step(num_blocks: int) -> None:
                nonlocal done
                done += num_blocks
                progress(done, len(missing) * own)

            for start in range(0, len(missing), _GROUP):
                group = missing[start : start + _GROUP]
                found, passes = score_windows(model, states, group, blocks, batch_size=batch_size, step=step)
                work.passes += passes
                for windows, score in zip(group, found, strict=True):
                    scores[windows] = score
                    on_main(partial(keep_score, cache, layout_of[windows], score))
    return [scores[windows] for windows in wanted]


def cache_folder(root: Path, model: PreTrainedModel, path_or_id: str | Path, blocks: TokenBlocks) -> Path:
    """The folder below ``root`` for scores of this checkpoint, in this dtype, on this text."""
    key = hashlib.sha256(f"{checkpoint_hash(path_or_id)} {model.dtype} {blocks.tokens.shape}".encode())
    for part in (blocks.tokens, blocks.document):
        key.update(np.ascontiguousarray(part).data)
    return root / key.hexdigest()[:16]


def score_table(
    layouts: Mapping[str, Layout], scores: Mapping[str, DocumentNLL], full: DocumentNLL, covered: Mapping[str, float]
) -> pd.DataFrame:
    """One row per layout, lowest NLL first, after that of full attention; columns ``COLUMNS``.

    NLL in nats per token, its change in percent of full attention's, with the standard error of the difference paired
    by document. ``covered`` is each layout's coverage in [0, 1]; NaN in the table where it has none.
    """
    num_heads = next(iter(layouts.values())).num_heads
    rows = [(FULL_ATTENTION, "", num_heads, 100.0, 100.0 if covered else np.nan, full.mean, np.nan, np.nan)]
    for name in sorted(layouts, key=lambda name: scores[name].mean):
        layout, change = layouts[name], paired_difference(scores[name], full)
        share, coverage = 100.0 * layout.num_global / num_heads, 100.0 * covered.get(name, np.nan)
        nll = (scores[name].mean, change.percent, change.standard_error)
        rows.append((name, layout.hash, layout.num_global, share, coverage, *nll))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def write_scores(folder: Path, rows: pd.DataFrame, origin: Mapping[str, Any]) -> None:
    """Write the table of ``score_table`` to ``zero-shot.csv``, and where it comes from to ``zero-shot.yaml``."""
    with replacing(folder) as new:
        write_csv(new / "zero-shot.csv", rows)
        write_record(new / "zero-shot.yaml", origin)


def kept_layouts(cache: Path) -> list[Layout]:
    """The layouts whose finished scores a cache has; files of an older version do not say theirs."""
    layouts = []
    for file in sorted(cache.glob("*.npz")):
        try:
            window, _, heads = str(read_arrays(file, (_LAYOUT,), "")["layout"]).partition("\n")
            layout = Layout(tuple(heads.split("/")), int(window))
        except (UserError, ValueError):
            continue
        if file.stem == layout.content_hash:
            layouts.append(layout)
    return layouts


def _file(cache: Path | None, layout: Layout | None) -> Path | None:
    return cache and cache / f"{FULL_ATTENTION if layout is None else layout.content_hash}.npz"


def keep_score(cache: Path | None, layout: Layout | None, score: DocumentNLL) -> None:
    """Write a finished score, and which layout it is of."""
    if (file := _file(cache, layout)) is not None:
        score.save(file, **({} if layout is None else {_LAYOUT.name: np.array(layout.content)}))


def read_score(cache: Path | None, layout: Layout | None, num_documents: int) -> DocumentNLL | None:
    """A finished score of a cache; None if it is not there or cannot be read, and so must be computed.

    The same blocks may have been cut from more or from fewer documents, of which they hold no token.
    """
    file = _file(cache, layout)
    if file is None or not file.is_file():
        return None
    try:
        score = DocumentNLL.read(file)
    except UserError:
        return None
    missing = (0, max(0, num_documents - len(score.total)))
    total, num_tokens = np.pad(score.total, missing), np.pad(score.num_tokens, missing)
    return DocumentNLL(total[:num_documents], num_tokens[:num_documents])


def score_windows(
    model: PreTrainedModel,
    states: Sequence[LayerState],
    ordered: Sequence[Windows],
    blocks: TokenBlocks,
    *,
    batch_size: int,
    step: Callable[[int], None],
) -> tuple[list[DocumentNLL], float]:
    """The NLL under each of ``ordered``, and the passes over the text that this took, parts counted as such.

    Collective.

    Args:
        model: inside ``full_attention``, which yields ``states``; their windows are set.
        ordered: different from each other and sorted, so that neighbours share the most layers.
        step: called with the number of blocks that this process has run under one of them; below 0 where it has to
            run them again.
    """
    sums = [DocumentSums(blocks) for _ in ordered]
    with _Resumable.of(model, block_tokens(blocks, 0, 1, model.device)) as decoder:
        starts = [0, *(decoder.shared(*pair) for pair in pairwise(ordered))]

        def run(_first: int, tokens: Tensor) -> list[Tensor]:
            losses: list[Tensor] = []
            try:
                for i, windows in enumerate(ordered):
                    for state, own in zip(states, windows, strict=True):
                        state.windows = own
                    losses.append(decoder.nll(tokens, starts[i], _falling(starts[i + 1 :])).cpu())
                    step(len(tokens))
            except Exception:
                step(-len(losses) * len(tokens))  # they may be run again
                raise
            finally:
                decoder.forget()
            return losses

        def add(first: int, losses: list[Tensor]) -> None:
            for each, own in zip(sums, losses, strict=True):
                each.add(first, own)

        run_own_batches(run, add, blocks, batch_size, model.device)
        passes = sum(decoder.share(start) for start in starts)
    return [each.result() for each in sums], passes


def _falling(starts: Sequence[int]) -> set[int]:
    """The depths at which later passes will resume on hidden states of this one or an earlier one."""
    return {depth for i, depth in enumerate(starts) if depth < min(starts[:i], default=depth + 1)}


class _Resumable:
    """A model's forward pass that can start at any decoder layer, on a hidden state kept from an earlier pass.

    The layers' ``forward`` is replaced while ``of`` is open. Where the attention layers have no common list of
    decoder layers, or such a pass gives another NLL (layers that share more than hidden states), every pass is whole.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        places = [name.rsplit(".", 2) for name in attention_layers(model)]  # list of layers, number, attention module
        stack = model.get_submodule(places[0][0]) if len({tuple(place[:-2]) for place in places}) == 1 else None
        self._layers = list(stack) if isinstance(stack, nn.ModuleList) else []
        self._depth = [int(place[1]) for place in places] if self._layers else []  # of each attention layer
        self._first = 0
        self._wanted: set[int] = set()
        self._kept: dict[int, Tensor] = {}  # by depth: what enters that layer

    @classmethod
    @contextmanager
    def of(cls, model: PreTrainedModel, tokens: Tensor) -> Iterator[_Resumable]:
        """``tokens`` int64 [1, T]: the first of them are run to see whether resuming is exact."""
        decoder = cls(model)
        before = [vars(layer).get("forward") for layer in decoder._layers]
        try:
            for depth, layer in enumerate(decoder._layers):
                layer.forward = partial(decoder._forward, depth, layer.forward)
            decoder._check(tokens[:, :16])
            yield decoder
        finally:
            for layer, forward in zip(decoder._layers, before, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward

    def shared(self, one: Windows, other: Windows) -> int:
        """Number of decoder layers from the first on that do the same with both windows."""
        if not self._depth:
            return 0
        return next(depth for depth, *pair in zip(self._depth, one, other, strict=True) if pair[0] != pair[1])

    def share(self, first: int) -> float:
        """Share of the decoder layers that a pass from ``first`` on runs."""
        return 1.0 - first / len(self._layers) if first else 1.0

    def nll(self, tokens: Tensor, first: int, wanted: set[int]) -> Tensor:
        """[B, T - 1] of ``tokens`` [B, T]; layers before ``first`` are left out, on the state that was kept for it.

        ``wanted``: the depths whose states to keep for later passes; of those below ``first`` it has them.
        """
        self._first, self._wanted = first, wanted
        losses = token_nll(self._model, tokens)
        self._kept = {depth: hidden for depth, hidden in self._kept.items() if depth in wanted}
        return losses

    def forget(self) -> None:
        """Keep no states any more."""
        self._kept = {}

    def _forward(
        self, depth: int, forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if depth < self._first:
            return hidden_states
        if depth == self._first > 0:
            hidden_states = self._kept[depth]
        elif depth in self._wanted:
            self._kept[depth] = hidden_states
        return forward(hidden_states, *args, **kwargs)

    def _check(self, tokens: Tensor) -> None:
        count = len(self._layers)
        depths = {1, count // 2, count - 1} - {0, count}
        whole = self.nll(tokens, 0, depths)
        try:
            exact = all(torch.equal(self.nll(tokens, depth, depths), whole) for depth in depths)
        except Exception:  # whatever a model does with what its layers return
            exact = False
        if not exact:
            self._depth = []
        self.forget()
