"""Next-token negative log-likelihood (NLL, nats per token) by document, and paired differences of it.

Two models are compared on the same tokens, so the standard error is that of the *paired* difference with documents
as clusters: far smaller than that of either NLL, and honest about tokens of one document being alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.errors import UserError


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
        """Write both arrays as ``.npz``."""
        np.savez_compressed(path, total=self.total, num_tokens=self.num_tokens)

    @classmethod
    def read(cls, path: Path) -> DocumentNLL:
        """What ``save`` wrote."""
        with np.load(path) as arrays:
            return cls(arrays["total"], arrays["num_tokens"])


@torch.inference_mode()
def document_nll(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    *,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> DocumentNLL:
    """NLL of ``blocks`` under ``model``, in evaluation mode, by document. A token belongs to the document it is in.

    ``progress`` is called with (blocks done, blocks in all).
    """
    was_training = model.training
    model.eval()
    total = np.zeros(len(blocks.documents))
    count = np.zeros(len(blocks.documents), dtype=np.int64)
    for start in range(0, blocks.num_blocks, batch_size):
        tokens = torch.from_numpy(blocks.tokens[start : start + batch_size].astype(np.int64)).to(model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
        owner = blocks.document[start : start + batch_size, 1:].ravel()
        np.add.at(total, owner, losses.cpu().numpy().astype(np.float64))
        np.add.at(count, owner, 1)
        if progress is not None:
            progress(start + len(tokens), blocks.num_blocks)
    model.train(was_training)
    return DocumentNLL(total, count)


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
