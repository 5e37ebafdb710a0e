"""Compute the NLL (nats per token) of a model by document; on all ranks, each of which runs its share of blocks."""

from contextlib import nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel

from spkv_nas.base.distributed import is_sharded, pass_device, sum_over_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Progress
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import micro_batch, paired
from spkv_nas.model import density_tracker, loss, modes


class DocumentSums:
    """Accumulator of the NLL of predicted tokens by document; tokens that begin a text are never predicted."""

    def __init__(self, blocks: TokenBlocks) -> None:
        """Start with zero for every document of ``blocks``."""
        self._blocks = blocks
        self._total = np.zeros(len(blocks.documents))
        self._count = np.zeros(len(blocks.documents), dtype=np.int64)

    def add(self, start: int, losses: torch.Tensor) -> None:
        """Add the token losses [B, T - 1] in nats of consecutive blocks from ``start`` on, without each first token."""
        blocks, rows = self._blocks, slice(start, start + len(losses))
        scored = ~blocks.boundaries.begins_text(blocks.tokens[rows])[:, 1:]
        owner = blocks.document[rows, 1:][scored]
        np.add.at(self._total, owner, losses.cpu().numpy().astype(np.float64)[scored])
        np.add.at(self._count, owner, 1)

    def result(self) -> paired.DocumentNLL:
        """Return the sums over all processes; call on all ranks. Raises ``UserError`` if one is not finite."""
        total, count = sum_over_processes(self._total), sum_over_processes(self._count)
        num_invalid, num_seen = int((~np.isfinite(total)).sum()), int((count > 0).sum())
        if num_invalid:
            raise UserError(
                f"the NLL of {num_invalid} of {num_seen} documents is not a finite number\n"
                "the model's weights are damaged or diverged, or its activations overflow in its dtype: load it in "
                "float32"
            )
        return paired.DocumentNLL(total, count)


@torch.inference_mode()
def document_nll(
    model: PreTrainedModel,
    blocks: TokenBlocks,
    *,
    batch_size: int = 8,
    watch: density_tracker.DensityTracker | None = None,
    progress: Progress | None = None,
) -> paired.DocumentNLL:
    """Compute the NLL of ``blocks`` under a model in evaluation mode, by document; ``UserError`` if not finite.

    ``batch_size`` blocks make a forward pass, fewer where a GPU runs out of memory; ``watch`` is a density tracker that
    has been started; ``progress`` receives (blocks done, in all) of this process.
    """
    micro_batch.check_blocks(model, blocks)
    sums = DocumentSums(blocks)

    def run(_start: int, tokens: torch.Tensor) -> torch.Tensor:
        with nullcontext() if watch is None else watch.whole_pass():
            return loss.token_nll(model, **blocks.boundaries.inputs(tokens))

    with modes.evaluation_mode(model):  # all ranks join in each pass of a sharded model
        run_own_batches(run, sums.add, blocks, batch_size, pass_device(model), progress, divides=not is_sharded(model))
    return sums.result()
