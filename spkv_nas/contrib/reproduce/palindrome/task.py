"""Dataset of the palindrome task: numbers, a long instruction, then the same numbers in reverse.

SP-KV paper, appendix "Palindrome reversal with long instruction gap". A token is a two-digit number, a whitespace, a
word of the instruction, or the start of the sequence:

    <s> 57 _ 12 _ ... _ 70 now read the list ... written backwards 70 _ ... _ 12 _ 57

Only the output after the instruction is scored. Whitespace is easy to learn, so a model without access to the input
reaches N ln(100) / (2N - 1) nats per output token: 2.34 for N = 32 numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

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
class Palindromes(Dataset[dict[str, Tensor]]):
    """Dataset of ``num_sequences`` sequences, generated on access from ``seed``, ``heldout`` and the index.

    With 100^N possible sequences, repeats and overlaps between training and held-out data do not occur in practice.
    """

    num_sequences: int
    seed: int = 0
    heldout: bool = False
    num_numbers: int = 32  # N

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self.num_sequences

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``labels``, int64 [T]; labels are -100 outside the output.

        Raises:
            IndexError: there is no such sequence.
        """
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
