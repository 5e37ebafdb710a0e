"""Training where a GPU has no memory for a pass: the same steps in smaller passes, from the last checkpoint on.

``auto_find_batch_size`` of transformers would take smaller steps. Here the run begins again as the same command would
with half the ``micro_batch_size``, so that nothing of the step that failed is left: gradients, counts of gates, prices.
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
    """Train or resume by the trainer that ``begin`` makes of the recipe, or of the recipe with smaller passes.

    Args:
        least: blocks that pass together at least.

    Raises:
        UserError: one of several processes has no memory for a pass, or as ``SPKVTrainer.train_or_resume``.
        torch.OutOfMemoryError: there is none for ``least`` blocks.

    Warns:
        UserWarning: passes are smaller from here on.
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
            if num_processes() > 1:  # the others wait for this one
                raise UserError(f"no memory for {size} blocks at once: give a smaller micro_batch_size") from error
        del trainer
        empty_cache()
        fewer = max(size // 2, least)
        warnings.warn(f"no memory for {size} blocks at once: at most {fewer} from here on", stacklevel=2)
        recipe = recipe.model_copy(update={"micro_batch_size": fewer})
