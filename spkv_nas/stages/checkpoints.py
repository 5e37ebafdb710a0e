"""Load the checkpoints that evaluations measure, with hard or open gates, and record which they were."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
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
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Loaded = tuple["PreTrainedModel", "PreTrainedTokenizerBase"]


def evaluated(options: SubjectOptions) -> Subject:
    """Return the checkpoint to evaluate with its text; results take the name of ``result_name``."""
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


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint that answers questions, at a threshold of its gates; None takes the checkpoint's own."""

    source: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tau: float | None = None

    @classmethod
    def load(cls, options: InDtype, source: str, tau: float | None, reporter: Reporter) -> Checkpoint:
        """Load a checkpoint as ``load`` does."""
        return cls(source, *load(options, source, reporter), tau)

    @property
    def origin(self) -> dict[str, Any]:
        """Return the record of which checkpoint was evaluated, at which dtype and threshold."""
        from spkv_nas.model.checkpoint import model_origin
        from spkv_nas.model.config_section import gate_config

        gates = gate_config(self.model)
        tau = gates.tau if self.tau is None and gates is not None else self.tau
        return {**model_origin(self.source), "computed_in": dtype_name(self.model.dtype), "tau": tau}

    def identity(self, mode: object) -> str:
        """Return a text of everything that answers depend on besides the questions, such as ``mode``: of its gates."""
        from spkv_nas.data.block_cache import fingerprint
        from spkv_nas.model.checkpoint import checkpoint_hash

        return f"{checkpoint_hash(self.source)} {self.model.dtype} {fingerprint(self.tokenizer)} {mode}"

    def hard(self) -> AbstractContextManager[Any]:
        """Return a context in which its gates, if any, are hard. Raises ``UserError`` for a threshold without gates."""
        from spkv_nas.model.config_section import gate_config
        from spkv_nas.model.modes import gate_mode

        if gate_config(self.model) is not None:
            return gate_mode(self.model, "hard", self.tau)
        if self.tau is not None:
            raise UserError("the model has no gates, so --tau has no effect: remove --tau")
        return nullcontext()


@dataclass(frozen=True)
class SampledTable:
    """Result of an evaluation by samples: its name, table, the table's folder, and the folder of samples."""

    name: str
    rows: pd.DataFrame
    folder: Path
    samples: Path
