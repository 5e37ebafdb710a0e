"""Dataset of the palindrome task: numbers, a long instruction, then the same numbers in reverse; and its evaluation.

SP-KV paper, appendix "Palindrome reversal with long instruction gap". A token is a two-digit number, a whitespace, a
word of the instruction, or the start of the sequence:

    <s> 57 _ 12 _ ... _ 70 now read the list ... written backwards 70 _ ... _ 12 _ 57

Only the output after the instruction is scored. Whitespace is easy to learn, so a model without access to the input
reaches N ln(100) / (2N - 1) nats per output token: 2.34 for N = 32 numbers.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from spkv_nas.artifacts.histogram import threshold_logit
from spkv_nas.model import attention, modes

INSTRUCTION = (
    "now read the list of numbers above once more and write it down again in the opposite order so that the last "
    "number comes first and the first number comes last leave none of them out and add none of your own change no "
    "digit put a single space between every two numbers and stop as soon as the whole list has been written backwards"
)
NUM_VALUES = 100
WHITESPACE, START = " ", "<s>"
VOCABULARY = (*(f"{value:02d}" for value in range(NUM_VALUES)), WHITESPACE, START, *sorted(set(INSTRUCTION.split())))
KINDS = ("start", "number", "whitespace", "instruction", "output")

_ID = {token: index for index, token in enumerate(VOCABULARY)}
_INSTRUCTION = np.array([_ID[word] for word in INSTRUCTION.split()])


@dataclass(frozen=True)
class Palindromes(Dataset[dict[str, torch.Tensor]]):
    """Sequences generated on access from ``seed``, ``heldout`` and the index; of 100^N, repeats do not occur."""

    num_sequences: int
    seed: int = 0
    heldout: bool = False
    num_numbers: int = 32  # N

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self.num_sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels``, int64 [T]; labels are -100 outside the output."""
        if not 0 <= index < self.num_sequences:
            raise IndexError(index)
        values = np.random.default_rng([self.seed, self.heldout, index]).integers(NUM_VALUES, size=self.num_numbers)
        tokens = torch.from_numpy(
            np.concatenate([[_ID[START]], _spaced(values), _INSTRUCTION, _spaced(values[::-1])]).astype(np.int64)
        )
        labels = tokens.clone()
        labels[: -self.num_outputs] = -100
        return {"input_ids": tokens, "labels": labels}

    @property
    def num_outputs(self) -> int:
        """Return the number of scored tokens: N numbers and the whitespace between them."""
        return 2 * self.num_numbers - 1

    @property
    def length(self) -> int:
        """Return the number of tokens per sequence, T."""
        return 1 + 2 * self.num_outputs + len(_INSTRUCTION)

    @property
    def chance_nll(self) -> float:
        """Return the nats per output token of a model that knows the format but not the numbers."""
        return self.num_numbers * math.log(NUM_VALUES) / self.num_outputs

    @property
    def kinds(self) -> list[str]:
        """Return the kind of token at each of the T positions, from ``KINDS``."""
        listed = ["number", "whitespace"] * self.num_numbers
        return ["start", *listed[:-1], *["instruction"] * len(_INSTRUCTION), *["output"] * self.num_outputs]


def _spaced(values: np.ndarray) -> np.ndarray:
    """Insert whitespace tokens between values."""
    spaced = np.full(2 * len(values) - 1, _ID[WHITESPACE])
    spaced[::2] = values
    return spaced


@dataclass(frozen=True)
class Measures:
    """Results of a model on the task: NLL in nats per output token with soft and with hard gates.

    Utility and density of hard gates are means over heads and tokens; ``kept`` is the density by kind of token. What is
    of gates is None if there are none.
    """

    nll: float
    hard_nll: float | None = None
    mean_utility: float | None = None
    density: float | None = None
    kept: dict[str, float] | None = None


def take_measures(
    model: PreTrainedModel, sequences: Palindromes, tau: float = 0.5, *, batch_size: int = 64
) -> Measures:
    """Evaluate a model on ``sequences``, with soft gates and with hard gates at threshold ``tau``."""
    watch = GateWatch(model, tau)
    # Soft gates
    watch.start()
    nll = output_nll(model, sequences, batch_size)
    if (soft := watch.stop()) is None:
        return Measures(nll)
    # Hard gates
    watch.start()
    with modes.gate_mode(model, "hard", tau):
        hard_nll = output_nll(model, sequences, batch_size)
    hard = watch.stop()
    assert hard is not None
    utility, density, kinds = soft[0], hard[1], np.array(sequences.kinds)
    kept = {kind: float(density[kinds == kind].mean()) for kind in KINDS}
    return Measures(nll, hard_nll, float(utility.mean()), float(density.mean()), kept)


@torch.inference_mode()
def output_nll(model: PreTrainedModel, sequences: Palindromes, batch_size: int) -> float:
    """Compute nats per output token in evaluation mode, in the current gate mode."""
    total = 0.0
    with modes.evaluation_mode(model):
        for start in range(0, len(sequences), batch_size):
            rows = [sequences[index] for index in range(start, min(start + batch_size, len(sequences)))]
            tokens = torch.stack([row["input_ids"] for row in rows]).to(model.device)
            logits = model(input_ids=tokens, use_cache=False).logits[:, -sequences.num_outputs - 1 : -1]
            targets = tokens[:, -sequences.num_outputs :].flatten()
            total += float(F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum"))
    return total / (len(sequences) * sequences.num_outputs)


class GateWatch:
    """Recorder of mean utility and density (``u >= tau``) of all gates by position, between ``start`` and ``stop``."""

    def __init__(self, model: torch.nn.Module, tau: float = 0.5) -> None:
        """Record the gates of ``model``, with density at threshold ``tau``."""
        self._model = model
        self._threshold_logit = threshold_logit(tau)
        self._hooks = ExitStack()
        self._sums: list[torch.Tensor] = []  # [2, T] sums over heads and sequences, by forward pass and layer
        self._num_rows = 0

    def start(self) -> None:
        """Start recording, and discard what was recorded before."""
        self.stop()
        self._hooks = attention.watch_logits(self._model, self._add)

    def _add(self, _layer: int, logits: torch.Tensor, _is_text: torch.Tensor) -> None:
        """Add the utility logits [B, H, T] of one layer."""
        logits = logits.detach().flatten(0, 1)  # [B * H, T]
        self._sums.append(torch.stack([torch.sigmoid(logits).sum(0), (logits >= self._threshold_logit).float().sum(0)]))
        self._num_rows += len(logits)

    def stop(self) -> NDArray[np.float64] | None:
        """Stop, and return mean utility and density by position [2, T], over all else; None if no gate ran."""
        self._hooks.close()
        means = torch.stack(self._sums).double().sum(0).cpu().numpy() / self._num_rows if self._sums else None
        self._sums, self._num_rows = [], 0
        return means
