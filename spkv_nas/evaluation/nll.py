"""Next-token negative log-likelihood (NLL, nats per token) by document, and paired differences of it.

Two models are compared on the same tokens, so the standard error is that of the *paired* difference with documents
as clusters: far smaller than that of either NLL, and honest about tokens of one document being alike.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.errors import UserError
from spkv_nas.files import write_atomic


@dataclass(frozen=True)
class DocumentNLL:
    """Sums of token NLL and predicted tokens for each held-out document, both [documents]."""

    total: NDArray[np.float64]
    num_tokens: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """NLL in nats per token over all documents."""
        return float(self.total.sum() / self.num_tokens.sum())

    def save(self, path: Path) -> None:
        """Write both arrays as ``.npz``, atomically."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, total=self.total, num_tokens=self.num_tokens)
        write_atomic(path, buffer.getvalue())

    @classmethod
    def read(cls, path: Path) -> DocumentNLL:
        """What ``save`` wrote."""
        with np.load(path) as arrays:
            return cls(arrays["total"], arrays["num_tokens"])


class DocumentSums:
    """Adds up the NLL of predicted tokens by document. A token belongs to the document it is in."""

    def __init__(self, blocks: TokenBlocks) -> None:
        self._blocks = blocks
        self._total = np.zeros(len(blocks.documents))
        self._count = np.zeros(len(blocks.documents), dtype=np.int64)

    def add(self, start: int, tokens: Tensor, logits: Tensor) -> None:
        """``tokens`` int64 [B, T] of the blocks from ``start`` on, and their ``logits`` [B, T, V].

        Block by block: the float32 copies of one block's logits stay in the cache.
        """
        losses = torch.stack(
            [
                F.cross_entropy(some[:-1].float(), ids[1:], reduction="none")
                for some, ids in zip(logits, tokens, strict=True)
            ]
        )
        owner = self._blocks.document[start : start + len(tokens), 1:].ravel()
        np.add.at(self._total, owner, losses.flatten().cpu().numpy().astype(np.float64))
        np.add.at(self._count, owner, 1)

    def result(self) -> DocumentNLL:
        """The sums so far."""
        return DocumentNLL(self._total, self._count)


@torch.inference_mode()
def document_nll(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    *,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> DocumentNLL:
    """NLL of ``blocks`` under ``model``, in evaluation mode, by document.

    ``progress`` is called with (blocks done, blocks in all).
    """
    was_training = model.training
    model.eval()
    sums = DocumentSums(blocks)
    for start in range(0, blocks.num_blocks, batch_size):
        tokens = block_tokens(blocks, start, batch_size, model.device)
        sums.add(start, tokens, model(input_ids=tokens, use_cache=False).logits)
        if progress is not None:
            progress(start + len(tokens), blocks.num_blocks)
    model.train(was_training)
    return sums.result()


def block_tokens(blocks: TokenBlocks, start: int, number: int, device: torch.device) -> Tensor:
    """int64 [at most ``number``, T] on ``device``: the blocks from ``start`` on."""
    return torch.from_numpy(blocks.tokens[start : start + number].astype(np.int64)).to(device)


@dataclass(frozen=True)
class PairedDifference:
    """Relative change of NLL against a baseline, in percent, with its standard error."""

    percent: float
    standard_error: float


def paired_difference(candidate: DocumentNLL, baseline: DocumentNLL) -> PairedDifference:
    """ΔNLL of ``candidate`` against ``baseline`` in percent of the baseline's NLL.

    The standard error is that of a ratio estimator with documents as clusters.
    """
    if not np.array_equal(candidate.num_tokens, baseline.num_tokens):
        raise UserError("the two models were not evaluated on the same held-out text")
    seen = baseline.num_tokens > 0
    difference = (candidate.total - baseline.total)[seen]
    tokens = baseline.num_tokens[seen]
    mean = difference.sum() / tokens.sum()
    residual = difference - mean * tokens
    clusters = len(tokens)
    error = np.sqrt((residual**2).sum() * clusters / max(1, clusters - 1)) / tokens.sum()
    scale = 100.0 / baseline.mean
    return PairedDifference(float(mean * scale), float(error * scale))
