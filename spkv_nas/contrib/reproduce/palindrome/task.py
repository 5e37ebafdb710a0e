"""Dataset of the palindrome task: numbers, a long instruction, then the same numbers in reverse; and its evaluation.

SP-KV paper, appendix "Palindrome reversal with long instruction gap". A token is a two-digit number, a whitespace, a
word of the instruction, or the start of the sequence:

    <s> 57 _ 12 _ ... _ 70 now read the list ... written backwards 70 _ ... _ 12 _ 57

Only the output after the instruction is scored. Whitespace is easy to learn, so a model without access to the input
reaches N ln(100) / (2N - 1) nats per output token: 2.34 for N = 32 numbers.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from spkv_nas.model import attention, gates, modes

INSTRUCTION = (
    "now read the list of numbers above once more and write it down again in the opposite order "
    "so that the last number comes first and the first number comes last leave none of them out "
    "and add none of your own change no digit put a single space between every two numbers and "
    "stop as soon as the whole list has been written backwards"
)
NUM_VALUES = 100
WHITESPACE = " "
START = "<s>"
VOCABULARY = (
    *(f"{value:02d}" for value in range(NUM_VALUES)),
    WHITESPACE,
    START,
    *sorted(set(INSTRUCTION.split())),
)
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
        values = np.random.default_rng([self.seed, self.heldout, index]).integers(
            NUM_VALUES, size=self.num_numbers
        )
        tokens = torch.from_numpy(
            np.concatenate(
                [[_ID[START]], _spaced(values), _INSTRUCTION, _spaced(values[::-1])]
            ).astype(np.int64)
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
        return [
            "start",
            *listed[:-1],
            *["instruction"] * len(_INSTRUCTION),
            *["output"] * self.num_outputs,
        ]


def _spaced(values: np.ndarray) -> np.ndarray:
    """Insert whitespace tokens between values."""
    return np.insert(values, range(1, len(values)), _ID[WHITESPACE])


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
    # Soft gates
    with watched_gates(model, tau) as soft:
        nll = output_nll(model, sequences, batch_size)
    if not soft:
        return Measures(nll)
    # Hard gates
    with watched_gates(model, tau) as hard, modes.gate_mode(model, "hard", tau):
        hard_nll = output_nll(model, sequences, batch_size)
    # Average the gates by position
    utility, _ = torch.cat(soft, 1)
    _, is_open = torch.cat(hard, 1)
    density = is_open.mean(0).cpu().numpy()
    kinds = np.array(sequences.kinds)
    return Measures(
        nll=nll,
        hard_nll=hard_nll,
        mean_utility=float(utility.mean()),
        density=float(density.mean()),
        kept={kind: float(density[kinds == kind].mean()) for kind in KINDS},
    )


@torch.inference_mode()
def output_nll(model: PreTrainedModel, sequences: Palindromes, batch_size: int) -> float:
    """Compute nats per output token in evaluation mode, in the current gate mode."""
    total = 0.0
    with modes.evaluation_mode(model):
        for batch in DataLoader(sequences, batch_size):
            inputs = {name: tokens.to(model.device) for name, tokens in batch.items()}
            total += len(inputs["labels"]) * float(model(**inputs, use_cache=False).loss)
    return total / len(sequences)


@contextmanager
def watched_gates(model: torch.nn.Module, tau: float) -> Iterator[list[torch.Tensor]]:
    """Collect utility and openness (``u >= tau``) of all gates in the block, [2, B * H, T] by pass and layer."""
    collected: list[torch.Tensor] = []

    def add(_layer: int, logits: torch.Tensor, _is_text: torch.Tensor) -> None:
        """Add the utility logits [B, H, T] of one layer."""
        values = torch.stack([logits.sigmoid(), gates.keeps(logits, tau)])
        collected.append(values.flatten(1, 2).double())

    with attention.watch_logits(model, add):
        yield collected
