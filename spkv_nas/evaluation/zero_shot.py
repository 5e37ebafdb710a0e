"""Score layouts zero-shot: the NLL of a checkpoint's own weights under each layout, without training.

A score takes seconds where retraining takes minutes to hours, so a search can afford thousands. Layouts with equal
first layers share the hidden states of those layers, which is exact: the input of a layer depends only on the layers
before it. Finished scores are cached on disk by the content hash of the layout.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from spkv_nas.artifacts import comparison, result_tables
from spkv_nas.artifacts.displacement import COLUMNS, STATES, VALUES, Displacement
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base import arrays, distributed, errors, files
from spkv_nas.base.arrays import read_arrays
from spkv_nas.base.progress import SILENT, Progress, Reporter
from spkv_nas.cost.cache_cost import layout_share
from spkv_nas.data.batches import block_tokens, num_own_blocks, run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.tokenizer import Boundaries
from spkv_nas.evaluation import displacement, micro_batch, paired
from spkv_nas.evaluation.displacement import Comparison, StateRecorder
from spkv_nas.evaluation.nll import DocumentSums
from spkv_nas.model import checkpoint, config_section, loss
from spkv_nas.model.attention import LayerState, attention_layers
from spkv_nas.model.placement import input_device
from spkv_nas.model.windows import full_attention, layout_windows

_GROUP = 64  # layouts scored per group; a killed run loses at most one group

Windows = tuple[tuple[int, ...], ...]  # window of every KV head, by layer
_Measured = tuple[torch.Tensor, arrays.Float | None]  # token losses of blocks, and their ``VALUES``
Visible = tuple[int, Windows]  # sink tokens of local heads, windows


@dataclass
class Work:
    """Cost of zero-shot scoring: passes over the text, partial ones as fractions, and scores from the cache."""

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
    compared: list[Displacement | None] | None = None,
) -> list[paired.DocumentNLL]:
    """Compute the NLL by document of ``blocks`` under ``model`` with each layout on its weights, in order.

    During scoring the model's windows are lifted and its gates are open, so that a global head sees every key and a
    local head its window and sink tokens; learned sinks of a hybrid are left out, with a warning. None is full
    attention. At most one hidden state per layer is kept of ``batch_size`` blocks. Must be called on all ranks: each
    runs its share of the blocks, and rank 0 alone reads and extends ``cache``, a folder of finished scores of this
    model on this text (``cache_folder``). ``work`` receives what it cost, and ``compared`` how far the predictions with
    each layout are from those with full attention, which takes a pass with it, and None for full attention. Raises
    ``UserError`` if there is no text, or a layout is for another number of layers or KV heads.
    """
    _check(model, blocks)
    work = work or Work()
    with full_attention(model) as states:
        full = 0, tuple(state.head_windows(gated=False) for state in states)
        # Different layouts may have equal sink tokens and windows, which are scored once
        requested = [full if layout is None else _visible(model, layout) for layout in layouts]
        layout_of = dict(zip(requested, layouts, strict=True))
        # Read the scores that are cached
        reference = None if compared is None else full
        scores = _read_scores(cache, layout_of, len(blocks.documents), reference)
        missing = sorted(layout_of.keys() - scores.keys())
        reporter.reused(len(scores), len(layout_of), "zero-shot scores")
        work.reused += len(scores)
        done = 0
        num_own = num_own_blocks(blocks.num_blocks, batch_size)
        with reporter.bar("zero-shot scoring", "blocks") as progress:

            def step(num_blocks: int) -> None:
                nonlocal done
                done += num_blocks
                progress(done, len(missing) * num_own)

            # Score the others in sorted groups, where neighbours share the most layers
            for group in _groups(missing):
                group_scores, passes = _compared_scores(
                    model, states, group, blocks, batch_size, step, reference
                )
                work.passes += passes
                for visible, score in zip(group, group_scores, strict=True):
                    scores[visible] = score
                    if (file := _file(cache, layout_of[visible])) is not None:
                        distributed.on_main(partial(score.save, file))
    if compared is not None:
        compared += [scores[visible].displacement(blocks) for visible in requested]
    return [scores[visible].nll for visible in requested]


@dataclass(frozen=True)
class _Score:
    """NLL under a layout, and the comparison with full attention, if one was asked for."""

    nll: paired.DocumentNLL
    values: arrays.Float | None = (
        None  # ``VALUES``; None for full attention, and where nothing is compared
    )

    def displacement(self, blocks: TokenBlocks) -> Displacement | None:
        """Return the statistics of the comparison; None without any."""
        return None if self.values is None else displacement.summary(blocks, [self.values])

    def save(self, file: Path) -> None:
        """Write the NLL, after the comparison, as a score is finished once its NLL is there."""
        if self.values is not None:
            files.write_npz(_values_file(file), {VALUES.name: self.values})
        self.nll.save(file)


def _read_scores(
    cache: Path | None,
    layout_of: Mapping[Visible, Layout | None],
    num_documents: int,
    reference: Visible | None,
) -> dict[Visible, _Score]:
    """Read the finished scores; with a ``reference``, only those that were compared with it. Call on all ranks."""

    def read(visible: Visible, layout: Layout | None) -> _Score | None:
        nll = read_score(cache, layout, num_documents)
        if nll is None or reference is None or visible == reference:
            return None if nll is None else _Score(nll)
        file = _file(cache, layout)
        try:
            assert file is not None
            return _Score(nll, read_arrays(_values_file(file), (VALUES,), "")[VALUES.name])
        except errors.UserError:  # not compared yet
            return None

    found = distributed.on_main(
        lambda: {visible: read(visible, layout) for visible, layout in layout_of.items()}
    )
    return {visible: score for visible, score in found.items() if score is not None}


def _values_file(file: Path) -> Path:
    """Return the path of the comparison beside that of a score."""
    return file.with_name(f"{file.stem}-{VALUES.name}.npz")


def _visible(model: PreTrainedModel, layout: Layout) -> Visible:
    """Return what the heads of a layout see; sink tokens matter only beside local heads."""
    sinks = 0 if layout.num_global == layout.num_heads else layout.sinks
    return sinks, tuple(layout_windows(model, layout))


def _check(model: PreTrainedModel, blocks: TokenBlocks) -> None:
    """Check that the model can read the text, and warn of learned sinks, which scores leave out."""
    micro_batch.check_blocks(model, blocks)
    if config_section.has_learned_sinks(model.config):
        warnings.warn(
            "the learned sinks of this hybrid belong to its own layout: scores leave them out, "
            "for that layout too (evaluate measures the hybrid with them)",
            stacklevel=3,
        )


def _groups(ordered: Sequence[Visible]) -> Iterator[list[Visible]]:
    """Yield up to ``_GROUP`` at a time that have the same sink tokens."""
    for _, group in groupby(ordered, key=itemgetter(0)):
        members = list(group)
        for start in range(0, len(members), _GROUP):
            yield members[start : start + _GROUP]


def cache_folder(
    root: Path, model: PreTrainedModel, path_or_id: str | Path, blocks: TokenBlocks
) -> Path:
    """Return the folder below ``root`` for scores of this checkpoint, in this dtype, on this text."""
    key = hashlib.sha256(
        f"{checkpoint.checkpoint_hash(path_or_id)} {model.dtype} {blocks.tokens.shape}".encode()
    )
    for array in (blocks.tokens, blocks.document):
        key.update(np.ascontiguousarray(array).data)
    return root / key.hexdigest()[:16]


def cache_shares(
    model: PreTrainedModel, layouts: Mapping[str, Layout], context: int
) -> dict[str, float]:
    """Return the KV cache of each layout for ``context`` tokens, as a share of full attention's, by name.

    Raises ``UserError`` if a layout does not fit the model.
    """
    with full_attention(model) as states:
        native = [state.native_window for state in states]
        sizes = [state.head_dim for state in states]
    return {name: layout_share(layout, context, native, sizes) for name, layout in layouts.items()}


def score_table(
    layouts: Mapping[str, Layout],
    scores: Mapping[str, paired.DocumentNLL],
    full: paired.DocumentNLL,
    memory: Mapping[str, float],
    covered: Mapping[str, float],
    displaced: Mapping[str, Displacement | None] | None = None,
) -> pd.DataFrame:
    """Return one row per layout, lowest NLL first, below a row for full attention; columns of ``SCORES``.

    NLL is in nats per token; its change is in percent of full attention's, with the standard error of the difference
    paired by document. ``memory`` is that of ``cache_shares``; ``covered`` is coverage in [0, 1] by name, NaN in the
    table for a layout that has none. ``displaced`` says by name how far predictions are from full attention's.
    """
    num_heads = next(iter(layouts.values())).num_heads
    full_coverage = 100.0 if covered else np.nan
    rows = [
        (
            comparison.FULL_ATTENTION,
            "",
            num_heads,
            100.0,
            100.0,
            full_coverage,
            full.mean,
            np.nan,
            np.nan,
            "",
        )
    ]
    for name in sorted(layouts, key=lambda name: scores[name].mean):
        layout = layouts[name]
        change = paired.paired_difference(scores[name], full)
        share = 100.0 * layout.num_global / num_heads
        coverage = 100.0 * covered.get(name, np.nan)
        nll = (scores[name].mean, change.percent, change.standard_error)
        sizes = (layout.num_global, share, 100.0 * memory[name], coverage)
        rows.append((name, layout.hash, *sizes, *nll, layout.words))
    table = pd.DataFrame(rows, columns=result_tables.SCORES.header[: -len(COLUMNS)])
    known = [(displaced or {}).get(name) for name in table["strategy"]]
    for column in COLUMNS:
        table[column] = [np.nan if each is None else getattr(each, column) for each in known]
    return table.astype({"num_compared": "Int64"})


def score(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    layouts: Layout | Sequence[Layout] | Mapping[str, Layout],
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Score layouts on the current weights of ``model``, without retraining; the model is left unchanged.

    Args:
        model: dense, hybrid or gated model.
        blocks: text, preferably held out; the same for all layouts, so that their differences are paired by document.
        layouts: one layout, several, or several by name; without names each is called by its strategy.
        batch_size: blocks per forward pass.
        progress: called with (blocks done, total) over all layouts.

    Returns:
        One row for full attention and one per layout, lowest NLL first: strategy, hash, num_global, density_percent,
        kv_cache_percent (memory for one block, of full attention's), nll (nats per token), and its change from full
        attention in percent with the standard error; and the columns of ``Displacement``, KL divergence and others.

    Raises ``UserError``: if there is no text or no layout, a layout does not fit the model, or two have the same name.
    """
    named = by_name(layouts)
    reporter = Reporter.of(progress)
    compared: list[Displacement | None] = []
    full, *scores = zero_shot(
        model,
        [None, *named.values()],
        blocks,
        batch_size=batch_size,
        reporter=reporter,
        compared=compared,
    )
    memory = cache_shares(model, named, blocks.block_size)
    displaced = dict(zip(named, compared[1:], strict=True))
    rows = score_table(named, dict(zip(named, scores, strict=True)), full, memory, {}, displaced)
    return rows.drop(columns="coverage_percent")


def by_name(layouts: Layout | Sequence[Layout] | Mapping[str, Layout]) -> Mapping[str, Layout]:
    """Return layouts by name, or by strategy; ``UserError`` if there is none, or two have the same name."""
    if isinstance(layouts, Layout):
        layouts = [layouts]
    named = (
        layouts
        if isinstance(layouts, Mapping)
        else {layout.strategy or layout.hash: layout for layout in layouts}
    )
    if not named or len(named) < len(layouts):
        raise errors.UserError(
            "give at least one layout, each under a distinct name: {name: layout}"
        )
    return named


def _file(cache: Path | None, layout: Layout | None) -> Path | None:
    """Return the path of a layout's score in the cache; None without a cache."""
    return (
        cache
        and cache / f"{comparison.FULL_ATTENTION if layout is None else layout.content_hash}.npz"
    )


def read_score(
    cache: Path | None, layout: Layout | None, num_documents: int
) -> paired.DocumentNLL | None:
    """Read a finished score from a cache; None if it is missing or unreadable, so that it must be computed.

    The same blocks may have been cut from more or from fewer documents, of which they contain no token, so the score is
    padded or cropped to ``num_documents``.
    """
    file = _file(cache, layout)
    if file is None or not file.is_file():
        return None
    try:
        score = paired.DocumentNLL.read(file)
    except errors.UserError:
        return None
    # Fit the score to the number of documents
    padding = (0, max(0, num_documents - len(score.total)))
    total = np.pad(score.total, padding)
    num_tokens = np.pad(score.num_tokens, padding)
    return paired.DocumentNLL(total[:num_documents], num_tokens[:num_documents])


def score_windows(
    model: PreTrainedModel,
    states: Sequence[LayerState],
    ordered: Sequence[Windows],
    blocks: TokenBlocks,
    *,
    batch_size: int,
    step: Callable[[int], None],
    sinks: int = 0,
) -> tuple[list[paired.DocumentNLL], float]:
    """Compute the NLL under each of ``ordered``, and the number of passes over the text (partial ones as fractions).

    Neighbours of ``ordered``, distinct windows, should share the most layers. The model is inside ``full_attention``,
    which yields ``states``. ``step`` receives the number of blocks that this process has run under a layout, negative
    where they have to be run again. ``sinks`` are the first tokens that local heads see. Must be called on all ranks.
    """
    visible = [(sinks, windows) for windows in ordered]
    scores, passes = _compared_scores(
        model, states, visible, blocks, batch_size, step, reference=None
    )
    return [score.nll for score in scores], passes


def _compared_scores(
    model: PreTrainedModel,
    states: Sequence[LayerState],
    ordered: Sequence[Visible],
    blocks: TokenBlocks,
    batch_size: int,
    step: Callable[[int], None],
    reference: Visible | None,
) -> tuple[list["_Score"], float]:
    """Compute ``score_windows``, and compare each with ``reference``, which is that of full attention; None: do not."""
    visible = [*ordered]
    if reference is not None:  # first, as the others are compared with it
        visible = [reference, *(each for each in ordered if each != reference)]
    sums = {each: _Sums(blocks, is_compared=reference not in (None, each)) for each in visible}
    with _Resumable.of(
        model, block_tokens(blocks, 0, 1, input_device(model)), blocks.boundaries
    ) as decoder:
        # Run each layout from the first layer in which it differs from the one before
        starts = [0]
        for (first_sinks, windows), (other_sinks, others) in pairwise(visible):
            is_alike = first_sinks == other_sinks  # sinks matter where a layer has a native window
            starts.append(decoder.shared(windows, others) if is_alike else 0)
        passes = _Passes(
            decoder=decoder,
            states=states,
            blocks=blocks,
            visible=visible,
            starts=starts,
            compares=reference is not None,
            num_extra=len(visible) - len(ordered),
            step=step,
        )

        def add(first: int, measured: list[_Measured]) -> None:
            for layout_sums, (losses, values) in zip(sums.values(), measured, strict=True):
                layout_sums.add(first, losses, values)

        # Run every batch, and add up the shares of the layers that were run
        run_own_batches(passes.run, add, blocks, batch_size, input_device(model))
        num_passes = sum(decoder.share(start) for start in starts)
    scores = {each: layout_sums.result() for each, layout_sums in sums.items()}
    return [scores[each] for each in ordered], num_passes


@dataclass(frozen=True)
class _Passes:
    """Passes over a batch of blocks, under one layout after another; the first is full attention if they compare."""

    decoder: "_Resumable"
    states: Sequence[LayerState]
    blocks: TokenBlocks
    visible: Sequence[Visible]
    starts: Sequence[int]  # first layer to run of each pass
    compares: bool
    num_extra: int  # first passes that no score was asked for of, which ``step`` does not count
    step: Callable[[int], None]

    def run(self, first: int, tokens: torch.Tensor) -> list[_Measured]:
        """Return what the blocks ``tokens`` [B, T] from ``first`` on give under each layout."""
        measured: list[_Measured] = []
        part = self.blocks.part(slice(first, first + len(tokens))) if self.compares else self.blocks
        recorder = StateRecorder(part) if self.compares else None
        comparison: Comparison | None = None
        try:
            for i, (sinks, windows) in enumerate(self.visible):
                for state, layer_windows in zip(self.states, windows, strict=True):
                    state.set_windows(layer_windows, sinks)
                if recorder is not None and i > 0:
                    states = recorder.result()[STATES.name]
                    comparison = Comparison(part, states, self.decoder.model)
                later = _falling(self.starts[i + 1 :])
                losses = self.decoder.nll(tokens, self.starts[i], later, comparison or recorder)
                values = None if comparison is None else comparison.result()[VALUES.name]
                measured.append((losses.cpu(), values))
                self.step(len(tokens) if i >= self.num_extra else 0)
        except Exception:
            # An out-of-memory error halves the batch and runs it again
            self.step(-max(0, len(measured) - self.num_extra) * len(tokens))
            raise
        finally:
            self.decoder.forget()
        return measured


class _Sums:
    """Accumulator of the NLL by document under a layout, and of the comparison with full attention."""

    def __init__(self, blocks: TokenBlocks, *, is_compared: bool) -> None:
        """Begin with zero for every document and every compared token."""
        self._by_document = DocumentSums(blocks)
        self._values = displacement.no_values(blocks) if is_compared else None

    def add(self, first: int, losses: torch.Tensor, values: arrays.Float | None) -> None:
        """Add the token losses [B, T - 1] of consecutive blocks from ``first`` on, and their ``VALUES``, if any."""
        self._by_document.add(first, losses)
        if self._values is not None and values is not None:
            self._values[:, first : first + len(losses)] = values

    def result(self) -> "_Score":
        """Return the score over all processes; call on all ranks."""
        nll = self._by_document.result()
        if self._values is None:
            return _Score(nll)
        return _Score(nll, distributed.sum_over_processes(self._values))


def _falling(starts: Sequence[int]) -> set[int]:
    """Return the depths from which later passes resume on a hidden state of this pass or an earlier one."""
    return {depth for i, depth in enumerate(starts) if depth < min(starts[:i], default=depth + 1)}


class _Resumable:
    """A model's forward pass that can start at any decoder layer, from a hidden state kept from an earlier pass.

    ``forward`` of the layers is replaced while ``of`` is open. If the attention layers have no common list of decoder
    layers, or a resumed pass gives another NLL (layers that share more than hidden states), every pass is complete.
    """

    def __init__(self, model: PreTrainedModel, boundaries: Boundaries) -> None:
        self.model = model
        self._boundaries = boundaries
        # List of layers, index, attention module
        paths = [name.rsplit(".", 2) for name in attention_layers(model)]
        stack = (
            model.get_submodule(paths[0][0])
            if len({tuple(path[:-2]) for path in paths}) == 1
            else None
        )
        self._layers = list(stack) if isinstance(stack, torch.nn.ModuleList) else []
        # Decoder layer of each attention layer
        self._depth = [int(path[1]) for path in paths] if self._layers else []
        self._first = 0  # layer that the pass starts at
        # Depths whose hidden states are kept for later passes
        self._resume_depths: set[int] = set()
        self._kept: dict[
            int, torch.Tensor
        ] = {}  # hidden states [B, T, C] that enter a layer, by depth

    @classmethod
    @contextmanager
    def of(
        cls, model: PreTrainedModel, tokens: torch.Tensor, boundaries: Boundaries
    ) -> "Iterator[_Resumable]":
        """Replace ``forward`` of the layers while open; ``tokens`` [1, T] test whether resuming is exact."""
        decoder = cls(model, boundaries)
        originals = [vars(layer).get("forward") for layer in decoder._layers]
        # Replace the layers' methods, and test that resuming is exact
        try:
            for depth, layer in enumerate(decoder._layers):
                layer.forward = partial(decoder._forward, depth, layer.forward)
            decoder._check(tokens[:, :16])
            yield decoder
        finally:
            # Restore the layers
            for layer, forward in zip(decoder._layers, originals, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward

    def shared(self, first: Windows, second: Windows) -> int:
        """Return the number of leading decoder layers that are equal under both windows."""
        if not self._depth:
            return 0
        return next(
            depth
            for depth, *pair in zip(self._depth, first, second, strict=True)
            if pair[0] != pair[1]
        )

    def share(self, first: int) -> float:
        """Return the share of the decoder layers that a pass from layer ``first`` runs."""
        return 1.0 - first / len(self._layers) if first else 1.0

    def nll(
        self,
        tokens: torch.Tensor,
        first: int,
        resume_depths: set[int],
        comparison: StateRecorder | Comparison | None = None,
    ) -> torch.Tensor:
        """Compute the token NLL [B, T - 1] of ``tokens`` [B, T] from layer ``first``, on the hidden state kept for it.

        Hidden states at ``resume_depths`` are kept for later passes; those below ``first`` already are. ``comparison``
        is of these blocks alone.
        """
        self._first = first
        self._resume_depths = resume_depths
        inputs = self._boundaries.inputs(tokens)
        if comparison is None:
            losses = loss.token_nll(self.model, **inputs)
        else:
            losses = comparison.token_nll(self.model, 0, inputs)
        self._kept = {
            depth: hidden for depth, hidden in self._kept.items() if depth in resume_depths
        }
        return losses

    def forget(self) -> None:
        """Discard all kept hidden states."""
        self._kept = {}

    def _forward(
        self,
        depth: int,
        forward: Callable[..., Any],
        hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run, skip or resume one decoder layer in place of its ``forward``."""
        if depth < self._first:
            return hidden_states
        if depth == self._first > 0:
            hidden_states = self._kept[depth]
        elif depth in self._resume_depths:
            self._kept[depth] = hidden_states
        return forward(hidden_states, *args, **kwargs)

    def _check(self, tokens: torch.Tensor) -> None:
        """Disable resuming unless passes from several layers reproduce a complete pass bit by bit."""
        num_layers = len(self._layers)
        depths = {1, num_layers // 2, num_layers - 1} - {0, num_layers}
        complete = self.nll(tokens, 0, depths)
        try:
            exact = all(torch.equal(self.nll(tokens, depth, depths), complete) for depth in depths)
        except Exception:  # models may fail in any way on the tensors that skipped layers return
            exact = False
        if not exact:
            self._depth = []
        self.forget()
