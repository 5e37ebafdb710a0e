"""Held-out evaluation with the blocks split over the processes of torchrun."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from spkv_nas.base.distributed import num_processes, process_index, sum_over_processes
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.evaluation.sweep import Evaluation


def split_evaluation(
    model: PreTrainedModel, blocks: TokenBlocks, batch_size: int, evaluate_blocks: Callable[[TokenBlocks], Evaluation]
) -> Evaluation:
    """``evaluate_blocks(blocks)``, each process taking its share of them; all get the whole result. Collective.

    A forward pass of a sharded model is collective, so all processes make the same number of them: those with a
    shorter share end with one that counts for nothing.

    Args:
        batch_size: blocks per forward pass of ``evaluate_blocks``.
    """
    processes = num_processes()
    if processes == 1:
        return evaluate_blocks(blocks)
    mine = blocks.every(processes, process_index())
    own = evaluate_blocks(mine)
    passes = math.ceil(math.ceil(blocks.num_blocks / processes) / batch_size)
    for _ in range(passes - math.ceil(mine.num_blocks / batch_size)):
        document_nll(model, blocks.take(1))
    share = mine.num_blocks / blocks.num_blocks
    sums = np.stack([own.nll.total, own.nll.num_tokens, np.full_like(own.nll.total, share * (own.density or 0.0))])
    total, num_tokens, density = sum_over_processes(torch.from_numpy(sums)).cpu().numpy()
    return Evaluation(
        DocumentNLL(total, num_tokens.astype(np.int64)), own.tau, None if own.tau is None else float(density[0])
    )
