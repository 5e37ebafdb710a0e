"""Recovery from out-of-memory errors: restart from the last checkpoint with a smaller micro-batch and equal batches.

The option ``auto_find_batch_size`` of transformers would reduce the batch. Here, the run is restarted with half the
``micro_batch_size``, so that no state of the failed step remains: gradients, gate counts or prices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from spkv_nas.base.distributed import num_processes
from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import empty_cache, is_short_of_memory
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.trainer import SPKVTrainer


def train_in_fitting_passes(recipe: Recipe, begin: Callable[[Recipe], SPKVTrainer], least: int = 1) -> SPKVTrainer:
    """Train or resume a run, halving the micro-batch size whenever memory runs out.

    Args:
        recipe: the recipe.
        begin: function that creates a new trainer for a recipe.
        least: minimum number of blocks per micro-batch.

    Returns:
        The trainer that finished the run.

    Raises:
        UserError: memory runs out on one of several ranks, or as in ``SPKVTrainer.train_or_resume``.
        torch.OutOfMemoryError: memory is too small for ``least`` blocks.

    Warns:
        UserWarning: the micro-batch size was halved.
    """
    while True:
        trainer = begin(recipe)
        size = trainer.args.per_device_train_batch_size
        try:
            trainer.train_or_resume()
            return trainer
        except Exception as error:
            if size == least or not is_short_of_memory(error):
                raise
            if num_processes() > 1:  # the other ranks are waiting for this one
                raise UserError(f"out of memory for {size} blocks per pass: set a smaller micro_batch_size") from error
        # Free the memory, and resume with half the blocks
        del trainer
        empty_cache()
        fewer = max(size // 2, least)
        warnings.warn(f"out of memory for {size} blocks per pass: continuing with at most {fewer}", stacklevel=2)
        recipe = recipe.model_copy(update={"micro_batch_size": fewer})
