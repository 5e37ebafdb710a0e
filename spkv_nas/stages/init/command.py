"""Run the ``init`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.init.options import InitOptions
from spkv_nas.stages.result import Result


def init(options: InitOptions, reporter: Reporter) -> Result:
    """Write a starter recipe for a model and a text, with sizes that fit the model, the text and this machine.

    Retraining learns from the text and the model's own predictions (distillation), after a warm-up and at a low
    learning rate, as a finished model needs. Chooses gate settings that reach sparsity within the training steps. Runs
    a few training steps to estimate the tokens, time and memory of the whole workflow.
    """
    from spkv_nas.stages.init import stage

    recipe = stage.init(options, reporter)
    return Result(recipe, stage.show, stage.document, next=recipe.next)
