"""Schema of the recipe section ``data``: which text to use, and how to cut it into blocks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from spkv_nas.artifacts.defaults import BLOCK_SIZE, HELDOUT_TOKENS
from spkv_nas.base.limits import MOST_BLOCK_SIZE, MOST_WHOLE
from spkv_nas.base.schema import Section

ALL_TASKS: Literal["all-but-qa"] = "all-but-qa"


class SourceConfig(Section):
    """A text source with options; exactly one of ``path`` and ``dataset``."""

    path: str | None = None
    dataset: str | None = Field(None, description="a data set of the Hugging Face hub or cache")
    name: str | None = Field(None, description="the data set's configuration")
    split: str | None = Field(None, description="the data set's split; train by default")
    text_field: str | None = None
    domain: str | None = None
    domain_field: str | None = None
    max_documents: int | None = Field(None, ge=1, le=MOST_WHOLE)

    @model_validator(mode="after")
    def _one_origin(self) -> SourceConfig:
        """Require exactly one of ``path`` and ``dataset``."""
        if (self.path is None) == (self.dataset is None):
            raise ValueError("a source has either 'path' or 'dataset'")
        return self


class RulerMix(Section):
    """Samples of RULER, with their answers, as blocks of the training text (SP-KV paper: 1.7 % of the decay's)."""

    share: float = Field(gt=0.0, le=1.0, description="of the training blocks")
    tasks: Literal["all-but-qa"] | list[str] = Field(
        ALL_TASKS, description="names of RULER's tasks; those on documents are not among them"
    )
    loss: Literal["all", "answers"] = Field("all", description="which of their tokens are learned")
    lengths: list[int] | None = Field(
        None, min_length=1, description="tokens of the samples of a block, one of them by lot; a block by default"
    )
    haystack: list[str] = Field([], description="files and folders of essays, in which needles hide")

    def tasks_of(self, known: list[str]) -> list[str]:
        """Return the tasks named, or all ``known`` tasks, which need no file of questions."""
        return known if self.tasks == ALL_TASKS else list(self.tasks)


class MixConfig(Section):
    """What is mixed into the training text; held-out text is left alone."""

    ruler: RulerMix


class DataConfig(Section):
    """Text and how it is cut."""

    sources: list[str | SourceConfig] = Field(min_length=1)
    block_size: int = Field(BLOCK_SIZE, ge=2, le=MOST_BLOCK_SIZE, description="tokens per block")
    heldout: float = Field(0.05, gt=0.0, lt=1.0, description="share of documents, by content hash")
    max_heldout_tokens: int = Field(HELDOUT_TOKENS, ge=1, le=MOST_WHOLE)
    mix: MixConfig | None = Field(None, description="what is mixed into the training text")

    @model_validator(mode="after")
    def _fitting_samples(self) -> DataConfig:
        """Require sample lengths that fit in a block."""
        lengths = [] if self.mix is None else self.mix.ruler.lengths or []
        if any(not 1 <= length <= self.block_size for length in lengths):
            raise ValueError(f"mix.ruler.lengths: a sample has 1 to {self.block_size} tokens, those of a block")
        return self
