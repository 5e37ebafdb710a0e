"""Pack RULER samples, with their answers, into token blocks for training."""

from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.limits import MAX_SEED
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample import Sample, first_fitting
from spkv_nas.data.ruler.tasks import generate
from spkv_nas.data.tokenizer import PLAIN, Boundaries, Tokenizer, encode, unmarked

DOMAIN = "ruler"
_FIRST_SEED = MAX_SEED + 1  # disjoint from the seeds of evaluations
_HELD_OUT_SEED = 2 * _FIRST_SEED  # disjoint from the seeds of training runs


@dataclass(frozen=True)
class RulerBlocks:
    """Generated blocks of ``block_size`` tokens, addressed by index, the same in every process."""

    tokenizer: Tokenizer  # tokenizer of the model
    block_size: int  # tokens per block
    # Tasks that each sample is drawn from; a task that does not fit is replaced by another
    tasks: tuple[str, ...]
    # Token lengths; each block draws one for its samples, and holds as many as fit
    lengths: tuple[int, ...]
    learns_all: bool  # True if text and question are learned too, not only the answers
    seed: int  # seed of the samples
    material: Material  # essays and questions of the user
    # Tokens that every block begins with, and those after each sample
    boundaries: Boundaries = PLAIN

    def check(self) -> None:
        """Raise ``UserError`` unless every task fits in the longest samples, and some task in every length."""
        for task in self.tasks:
            self._generate(task, 0, max(self.lengths))
        for length in self.lengths:
            self._draw(Random(0), 0, length)

    def block(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return (tokens int64, bool mask of learned ones), [block_size]; what a sample leaves empty is padding.

        The first token of each separate sample is marked (``Boundaries.with_starts``).
        """
        packed, learned = self._packed(number)
        tokens = self.boundaries.with_starts(unmarked(packed), packed < 0)
        return tokens.astype(np.int64), learned

    def _packed(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens of a block, those that begin a text marked, and which of them are learned."""
        rng = Random(f"{self.seed}/{number}")
        length = rng.choice(self.lengths)
        # Start with the opening tokens and padding
        num_opening = len(self.boundaries.opening)
        tokens = np.full(self.block_size, self.boundaries.filling, dtype=np.int32)
        learned = np.zeros(self.block_size, dtype=np.bool_)
        tokens[:num_opening] = ~np.array(self.boundaries.opening, dtype=np.int32)
        num_samples = 0
        position = num_opening
        # Append samples while another one fits
        while self.block_size - position >= length:
            sample = self._draw(rng, number * self.block_size + num_samples, length)
            prompt, answer_tokens = encode([sample.text, sample.continuation], self.tokenizer)
            answer = position + len(prompt)
            sample_tokens = self.boundaries.ended(np.concatenate([prompt, answer_tokens]))
            end = position + len(sample_tokens)
            # Write prompt and answer, and mark the tokens to learn
            tokens[position:end] = sample_tokens
            first_learned = position if self.learns_all else answer
            learned[first_learned:end] = True
            num_samples += 1
            position = end
        return tokens, learned

    def held_out(self, num_blocks: int) -> TokenBlocks:
        """Return blocks that no run learns from, each a document of the domain ``ruler``."""
        held_out_blocks = replace(self, seed=_HELD_OUT_SEED)
        marked = np.stack([held_out_blocks._packed(number)[0] for number in range(num_blocks)])
        numbers = np.arange(num_blocks, dtype=np.int32)
        infos = [
            DocumentInfo(f"{DOMAIN}-{number}", DOMAIN, f"sample {number}")
            for number in range(num_blocks)
        ]
        return TokenBlocks(
            tokens=unmarked(marked),
            document=np.repeat(numbers[:, None], self.block_size, 1),
            documents=tuple(infos),
            boundaries=self.boundaries,
            begins=marked < 0,
        )

    def _draw(self, rng: Random, index: int, length: int) -> Sample:
        """Generate a sample of the first task, in random order, that fits."""
        order = rng.sample(self.tasks, len(self.tasks))
        return first_fitting(partial(self._generate, task, index, length) for task in order)

    def _generate(self, task: str, index: int, length: int) -> Sample:
        seed = _FIRST_SEED + self.seed
        return generate(task, seed, index, length, self.tokenizer, self.material, is_answered=True)
