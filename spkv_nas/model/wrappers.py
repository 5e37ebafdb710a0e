"""Unwrap causal language models from PEFT, ``torch.compile`` and data parallelism."""

import sys

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.model.custom_model_type import native_class


def unwrapped(model: object, *, adds_gates: bool = False) -> PreTrainedModel:
    """Return the causal language model inside wrappers of PEFT, ``torch.compile`` and data parallelism.

    The wrapper computes with what is done to the model inside: adapters stay active, and compiled code is compiled anew
    where it has to be. ``adds_gates`` says that new parameters follow, which DDP would not know. Raises ``UserError``:
    no such model is inside, the wrapper computes more than it, or gates would be added inside DDP.
    """
    while not isinstance(model, PreTrainedModel):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise UserError(
                f"{type(model).__name__} adds virtual tokens, "
                "which are no part of the model inside: pass model.get_base_model() to leave them "
                "out"
            )
        # Remove one wrapper
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            if adds_gates and isinstance(model, nn.parallel.DistributedDataParallel):
                raise UserError(
                    f"{type(model).__name__} would not share the gradients of new gates: "
                    "add them to model.module, then wrap the model again"
                )
            model = model.module
        else:
            raise UserError(
                "model must be a causal language model of transformers; "
                f"found {type(model).__name__}: load one with model, "
                "tokenizer = spkv_nas.load(path)"
            )
    _check_class(model)
    return model


def _check_class(model: PreTrainedModel) -> None:
    """Raise ``UserError`` unless a model generates text from its own tokens, and is loaded as what it is."""
    kind = native_class(model.config)
    name = type(model).__name__
    known = AutoModelForCausalLM._model_mapping.get(kind, None)
    # A class of others is one that only they can load
    is_foreign = not type(model).__module__.startswith("transformers.")
    is_loaded = is_foreign or (known is not None and isinstance(model, known))
    sees_ahead = any(
        getattr(module, "is_causal", True) is False for module in model.get_decoder().modules()
    )
    if not model.can_generate() or model.config.is_encoder_decoder or sees_ahead or not is_loaded:
        raise UserError(
            f"{name} is no causal language model (AutoModelForCausalLM), "
            "so what is saved of it with gates or a layout could not be loaded again: "
            "pass the language model that it was made from"
        )


def check_no_adapter(model: nn.Module) -> None:
    """Raise ``UserError`` for a model with adapters of PEFT, whose files would hold the adapters alone."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # loaded if a model has adapters
    if tuners is not None and any(
        isinstance(module, tuners.BaseTunerLayer) for module in model.modules()
    ):
        raise UserError(
            "the model has adapters of PEFT, which a checkpoint cannot hold: "
            "merge them first (model = model.merge_and_unload()), "
            "or save them alone with their own save_pretrained"
        )
