"""Samples of RULER, with their answers, as blocks of tokens to train on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spkv_nas.base.limits import MOST_SEED
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.sample import Sample, first_fitting
from spkv_nas.data.ruler.tasks import generate
from spkv_nas.data.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOMAIN = "ruler"
_FIRST_SEED = MOST_SEED + 1  # so that no sample is one of an evaluation's
_HELD_OUT_SEED = 2 * _FIRST_SEED  # nor, of those held out, one of a run's


@dataclass(frozen=True)
class RulerBlocks:
    """Blocks of ``block_size`` tokens, by number, the same in every process.

    Attributes:
        tasks: of which each sample's is drawn; of one without room another takes the place.
        lengths: in tokens, of which each block's samples have one that is drawn; a block has as many as fit.
        learns_all: whether text and question are learned too, and not the answers alone.
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    learns_all: bool
    seed: int
    material: Material

    def check(self) -> None:
        """Raise ``UserError`` for a task that has no room in the longest samples, or a length without any."""
        for task in self.tasks:
            self._generate(task, 0, max(self.lengths))
        for length in self.lengths:
            self._draw(Random(0), 0, length)

    def block(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(tokens, which of them are learned), both [block_size].

        A sample ends as a text does. What samples leave empty is filled up, and not learned.
        """
        rng = Random(f"{self.seed}/{number}")
        length = rng.choice(self.lengths)
        stop = self.tokenizer.eos_token_id
        tokens = np.full(self.block_size, stop or 0, dtype=np.int64)
        learned = np.zeros(self.block_size, dtype=np.bool_)
        done = place = 0
        while self.block_size - place >= length:
            sample = self._draw(rng, number * self.block_size + done, length)
            asked, answered = encode([sample.text, sample.continuation], self.tokenizer)
            answer = place + len(asked)
            answered = np.append(answered, [] if stop is None else [stop])
            end = answer + len(answered)
            tokens[place:answer], tokens[answer:end] = asked, answered
            learned[place if self.learns_all else answer : end] = True
            done, place = done + 1, end
        return tokens, learned

    def held_out(self, num_blocks: int) -> TokenBlocks:
        """Blocks that no run learns from, each a document of the domain ``ruler``."""
        other = replace(self, seed=_HELD_OUT_SEED)
        tokens = np.stack([other.block(number)[0] for number in range(num_blocks)]).astype(np.int32)
        owner = np.repeat(np.arange(num_blocks, dtype=np.int32)[:, None], self.block_size, 1)
        infos = tuple(DocumentInfo(f"{DOMAIN}-{number}", DOMAIN, f"sample {number}") for number in range(num_blocks))
        return TokenBlocks(tokens, owner, infos)

    def _draw(self, rng: Random, index: int, length: int) -> Sample:
        order = rng.sample(self.tasks, len(self.tasks))
        return first_fitting(partial(self._generate, task, index, length) for task in order)

    def _generate(self, task: str, index: int, length: int) -> Sample:
        seed = _FIRST_SEED + self.seed
        return generate(task, seed, index, length, self.tokenizer, self.material, is_answered=True)
