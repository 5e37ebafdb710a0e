"""Load the checkpoints that evaluations measure, with hard or open gates, and record which they were."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spkv_nas.base.assets import EMBEDDED_PREFIX
from spkv_nas.base.device import AUTO, dtype_name, measuring_device
from spkv_nas.base.distributed import connect
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Reporter
from spkv_nas.stages.options import REFERENCE, InDtype, SubjectOptions
from spkv_nas.stages.sized_model import result_name
from spkv_nas.stages.subject import Subject

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Loaded = tuple["PreTrainedModel", "PreTrainedTokenizerBase"]


def evaluated(options: SubjectOptions) -> Subject:
    """Return the checkpoint to evaluate with its text; results take the name of ``result_name``.

    Raises:
        UserError: a model that is not embedded has no text.
    """
    subject = Subject.of(options, REFERENCE, "evaluate on")
    if options.name is not None or subject.source.startswith(EMBEDDED_PREFIX):
        return subject
    return replace(subject, name=result_name(subject.source, options.folders))


def check_pair(model: str, against: str | None) -> None:
    """Raise ``UserError`` if two checkpoints differ in their tokenizer, before anything large is read."""
    from spkv_nas.data.block_cache import fingerprint
    from spkv_nas.model.checkpoint import load_tokenizer

    if against is not None and fingerprint(load_tokenizer(against)) != fingerprint(load_tokenizer(model)):
        raise UserError(
            f"--against {against} has a different tokenizer: results are comparable only on the same tokens"
        )


def load(options: InDtype, source: str, reporter: Reporter) -> Loaded:
    """Load a checkpoint and its tokenizer; joins torchrun's processes and must be called on all ranks."""
    from spkv_nas.model.checkpoint import load_on
    from spkv_nas.model.model_shape import check_tokens

    reporter.announce(f"loading {source}")
    device = measuring_device(options.device)
    connect(device)
    model, tokenizer = load_on(source, device, options.dtype, spreads=options.device == AUTO)
    check_tokens(model, max(tokenizer.get_vocab().values()))
    return model, tokenizer


def identity(source: str, loaded: Loaded, mode: str) -> str:
    """Return a string of everything that answers depend on besides the questions.

    It names checkpoint, dtype, tokenizer and ``mode``. Answer files have its hash in their names.
    """
    from spkv_nas.data.block_cache import fingerprint
    from spkv_nas.model.checkpoint import checkpoint_hash

    model, tokenizer = loaded
    return f"{checkpoint_hash(source)} {model.dtype} {fingerprint(tokenizer)} {mode}"


def hard(model: PreTrainedModel, tau: float | None) -> AbstractContextManager[Any]:
    """Return a context in which a model's gates are hard. Raises ``UserError`` for a threshold without gates."""
    from spkv_nas.model.config_section import gate_config
    from spkv_nas.model.modes import gate_mode

    if gate_config(model) is not None:
        return gate_mode(model, "hard", tau)
    if tau is not None:
        raise UserError("the model has no gates, so --tau has no effect: remove --tau")
    return nullcontext()


def origin(source: str, model: PreTrainedModel, tau: float | None) -> dict[str, Any]:
    """Return the record of which checkpoint was evaluated, at which dtype and threshold."""
    from spkv_nas.model.checkpoint import model_origin
    from spkv_nas.model.config_section import gate_config

    gates = gate_config(model)
    checkpoint_tau = None if gates is None else gates.tau
    return {
        **model_origin(source),
        "computed_in": dtype_name(model.dtype),
        "tau": checkpoint_tau if tau is None else tau,
    }
