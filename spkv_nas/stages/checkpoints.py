"""Load the checkpoints that evaluations measure, with hard or open gates, and record which they were."""

from dataclasses import replace
from typing import TYPE_CHECKING

from spkv_nas.base import assets, distributed, errors, progress
from spkv_nas.base.device import AUTO, measuring_device
from spkv_nas.stages.options import REFERENCE, InDtype, SubjectOptions
from spkv_nas.stages.sized_model import result_name
from spkv_nas.stages.subject import Subject

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Loaded = tuple["PreTrainedModel", "PreTrainedTokenizerBase"]


def evaluated(options: SubjectOptions) -> Subject:
    """Return the checkpoint to evaluate with its text; results take the name of ``result_name``."""
    subject = Subject.of(options, REFERENCE, "evaluate on")
    if options.name is not None or subject.source.startswith(assets.EMBEDDED_PREFIX):
        return subject
    return replace(subject, name=result_name(subject.source, options.folders))


def check_pair(model: str, against: str | None) -> None:
    """Raise ``UserError`` if two checkpoints differ in their tokenizer, before anything large is read."""
    from spkv_nas.data.block_files import fingerprint
    from spkv_nas.model.checkpoint import load_tokenizer

    if against is not None and fingerprint(load_tokenizer(against)) != fingerprint(load_tokenizer(model)):
        raise errors.UserError(
            f"--against {against} has a different tokenizer: results are comparable only on the same tokens"
        )


def load(options: InDtype, source: str, reporter: progress.Reporter) -> Loaded:
    """Load a checkpoint and its tokenizer; joins torchrun's processes and must be called on all ranks."""
    from spkv_nas.model import checkpoint, model_shape

    reporter.announce(f"loading {source}")
    device = measuring_device(options.device)
    distributed.connect(device)
    model, tokenizer = checkpoint.load_on(source, device, options.dtype, spreads=options.device == AUTO)
    model_shape.check_tokens(model, max(tokenizer.get_vocab().values()))
    return model, tokenizer
