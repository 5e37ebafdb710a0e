"""Recognise measurements that make no sense: they show that text, separator, context or dtype are not the model's.

On text that a model knows, full attention loses to no layout without training, retraining on the same objective gains
little, and heads chosen by their scores lose less than random ones. Where that does not hold, no layout should be
recommended, and commands say so first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.device import dtype_name
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.paired import DocumentNLL, PairedDifference, paired_difference
from spkv_nas.evaluation.separators import MAX_PACKING_COST, SeparatorReport
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model.model_shape import config_shape, vocabulary_size

# Names of the layout of the highest scores, and of layouts to compare with
CHOSEN, RANDOM = (
    "densest",
    "random-",
)
_SIGNIFICANT = 2.0  # standard errors
_MIN_GAIN = 0.1  # percent of NLL
_MAX_CONTROL_GAIN = 2.0  # percent of NLL
# Of the NLL of token frequencies; models that know a text are below .5 (reports/LOG.md)
_MAX_SHARE = 0.7
_COUNTED = 1 << 20  # tokens for frequencies
_SAMPLE = 2048  # for a pass over a text


@dataclass(frozen=True)
class Circumstances:
    """Circumstances of a measurement, which tell the likely cause of an alarm.

    ``positions`` is the model's context, None if it is unknown; ``share`` its NLL as a share of the NLL of token
    frequencies; ``separator`` is what stands after a document.
    """

    block_size: int
    positions: int | None
    separator: SeparatorReport
    share: float
    dtype: str

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        blocks: TokenBlocks,
        full: DocumentNLL,
        separator: SeparatorReport,
    ) -> "Circumstances":
        """Describe the measurement of full attention on blocks."""
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        share = full.mean / frequency_nll(blocks, vocabulary_size(model))
        return cls(blocks.block_size, positions, separator, share, dtype_name(model.dtype))

    @property
    def is_too_long(self) -> bool:
        """Return True if blocks are longer than the model's context."""
        return self.positions is not None and self.block_size > self.positions

    @property
    def symptom(self) -> str | None:
        """Return what makes no sense about full attention itself; None if all is well."""
        if self.is_too_long:
            return f"blocks of {self.block_size:,} tokens are longer than the model's context"
        if self.share > _MAX_SHARE:
            return (
                f"the model's NLL is {100 * self.share:.0f} % of what token frequencies alone give"
            )
        return None

    @property
    def cause(self) -> str:
        """Return the likely cause of an alarm, and what to do about it, as a clause."""
        # Blame the length, the text or the tokenizer
        if self.is_too_long:
            return (
                f"the model's context is {self.positions:,} tokens: use --context {self.positions}"
            )
        if self.share > _MAX_SHARE:
            return "the text or the tokenizer is not what the model was trained with"
        # Blame the separator
        if not self.separator.nll:
            return (
                f"documents are separated by '{self.separator.best}', "
                "which was not measured on the model: leave --separator (data.separator) out"
            )
        if self.separator.packing_cost > MAX_PACKING_COST:
            return about_packing(self.separator)
        # Blame the precision, or else the kind of text
        if self.dtype != "float32":
            return (
                f"the model computes in {self.dtype}, or the text is unlike what it was trained "
                "on: try float32"
            )
        return "the text is unlike what the model was trained on"


def packing_warning(separator: SeparatorReport, blocks: TokenBlocks) -> str | None:
    """Return a warning if documents that share blocks cost the model more than 1 % of NLL; else None."""
    # Of tokens with another document before them
    share = float((blocks.document != blocks.document[:, :1]).mean())
    return (
        f"warning: {about_packing(separator)}"
        if share * separator.packing_cost > MAX_PACKING_COST
        else None
    )


def about_packing(separator: SeparatorReport) -> str:
    """Return a clause on what packing documents into blocks costs the model."""
    return (
        f"packing documents into blocks costs the model {separator.packing_cost:.1f} % of NLL, "
        "as it was trained on documents that do not see each other: "
        "use --documents separate (data.documents)"
    )


def frequency_nll(blocks: TokenBlocks, vocabulary: int) -> float:
    """Return the NLL of tokens, in nats, by their frequencies in the rest of at most a million tokens of the text.

    Tokens of the vocabulary that occur once count as any of those that do not occur.
    """
    tokens = blocks.tokens[: max(1, _COUNTED // blocks.block_size)].ravel()
    counts = np.bincount(tokens)
    once = counts == 1
    unseen = max(1, vocabulary - int((counts > 1).sum()))
    probability = np.where(once, max(1, int(once.sum())) / unseen, counts - 1) / len(tokens)
    return float(-(counts * np.log(np.where(counts > 0, probability, 1.0))).sum() / len(tokens))


def alarm(
    circumstances: Circumstances,
    full: DocumentNLL,
    scores: Mapping[str, DocumentNLL],
    layouts: Mapping[str, Layout],
) -> str | None:
    """Return a sentence on scores by layout, without training, that make no sense, with its likely cause; else None."""
    changes = [paired_difference(score, full) for score in scores.values()]
    if (found := changes_alarm(circumstances, changes)) is not None or not _loses_to_random(
        scores, layouts
    ):
        return found
    return _sentence(
        f"{CHOSEN} loses more without training than random layouts of as many heads", circumstances
    )


def changes_alarm(circumstances: Circumstances, changes: Sequence[PairedDifference]) -> str | None:
    """Return a sentence if changes of NLL by layouts without training make no sense, else None."""
    if circumstances.symptom is not None:
        return _sentence(circumstances.symptom, circumstances)
    better = sum(
        change.percent < -max(_MIN_GAIN, _SIGNIFICANT * change.standard_error) for change in changes
    )
    subject = f"{better} of {len(changes)} layouts have" if len(changes) > 1 else "a layout has"
    symptom = f"{subject} a lower NLL than full attention without training"
    return _sentence(symptom, circumstances) if better else None


def _sentence(symptom: str, circumstances: Circumstances) -> str:
    cause = circumstances.cause
    return (
        f"these numbers make no sense: {symptom}. Likely cause: {cause}. No layout is recommended."
    )


def _loses_to_random(scores: Mapping[str, DocumentNLL], layouts: Mapping[str, Layout]) -> bool:
    """Return True if the chosen heads have a significantly higher NLL than the mean of random ones of their number."""
    if CHOSEN not in layouts:
        return False
    number = layouts[CHOSEN].num_global
    rivals = [
        scores[name]
        for name in layouts
        if name.startswith(RANDOM) and layouts[name].num_global == number
    ]
    if not rivals:
        return False
    mean = DocumentNLL(np.mean([rival.total for rival in rivals], axis=0), rivals[0].num_tokens)
    change = paired_difference(scores[CHOSEN], mean)
    return change.percent > max(_MIN_GAIN, _SIGNIFICANT * change.standard_error)


def control_alarm(
    circumstances: Circumstances, control: DocumentNLL, dense: DocumentNLL
) -> str | None:
    """Return a sentence if retraining improves a finished model by more than a finished model can; else None."""
    change = paired_difference(control, dense)
    if not change.percent < -max(_MAX_CONTROL_GAIN, _SIGNIFICANT * change.standard_error):
        return None
    symptom = f"retraining improved full attention (the control) by {-change.percent:.1f} % of NLL"
    return _sentence(symptom, circumstances)


@torch.inference_mode()
def check_text(
    model: PreTrainedModel, blocks: TokenBlocks, window: int, separator: SeparatorReport
) -> tuple[Circumstances, str | None]:
    """Return (circumstances, a sentence if they make no sense) from two passes over a sample; call on all ranks."""
    # Score a sample with full attention, and with local heads only
    sample = blocks.spread(max(2, _SAMPLE // blocks.block_size))
    heads = config_shape(model.config).heads_per_layer
    local = Layout(heads=tuple("L" * number for number in heads), window=window, sinks=1)
    full, without = zero_shot(model, [None, local], sample, batch_size=1)
    circumstances = Circumstances.of(model, blocks, full, separator)
    return circumstances, alarm(circumstances, full, {"local": without}, {"local": local})
