"""Schema of the recipe section ``data``: which text to use, and how to cut it into blocks."""

from typing import Literal

from pydantic import Field, model_validator

from spkv_nas.artifacts.defaults import BLOCK_SIZE, HELDOUT_TOKENS
from spkv_nas.base import limits, schema

ALL_TASKS: Literal["all-but-qa"] = "all-but-qa"
AUTO: Literal["auto"] = "auto"
# What stands after a document
NO_SEPARATOR = "none"
EOS = "eos"
BOS = "bos"
EOS_BOS = "eos+bos"
SEPARATORS = (NO_SEPARATOR, EOS, BOS, EOS_BOS)
JOINED: Literal["joined"] = "joined"  # tokens see earlier documents of their block
# Tokens see only their own document, in which positions start again
SEPARATE: Literal["separate"] = "separate"

Bos = Literal["auto"] | bool


class SourceConfig(schema.Section):
    """Name a text source with options; exactly one of ``path`` and ``dataset``."""

    path: str | None = Field(None, description="file, folder, stdlib or installed")
    dataset: str | None = Field(
        None, description="data set on the Hugging Face hub or in its cache"
    )
    name: str | None = Field(None, description="configuration of the data set")
    split: str | None = Field(None, description="split of the data set; default: train")
    text_field: str | None = Field(
        None,
        description=(
            "field or column with the text, or with the messages of a chat; default: text, "
            "else messages"
        ),
    )
    domain: str | None = Field(None, description="domain of all documents of this source")
    domain_field: str | None = Field(
        None, description="field or column with the document's domain; default: domain"
    )
    max_documents: int | None = Field(
        None, ge=1, le=limits.MAX_WHOLE, description="maximum number of documents"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> "SourceConfig":
        """Require exactly one of ``path`` and ``dataset``."""
        if (self.path is None) == (self.dataset is None):
            raise ValueError("a source needs either 'path' or 'dataset', not both")
        if self.dataset is None and (self.name, self.split) != (None, None):
            raise ValueError(
                "'name' and 'split' belong to a 'dataset', and this source has a 'path'"
            )
        return self


class RulerMix(schema.Section):
    """Mix samples of RULER, with their answers, into the training blocks (SP-KV paper: 1.7 % of the decay's)."""

    share: float = Field(gt=0.0, le=1.0, description="share of the training blocks")
    tasks: Literal["all-but-qa"] | list[str] = Field(
        ALL_TASKS,
        description="names of RULER's tasks; all-but-qa: all tasks without a question file",
    )
    loss: Literal["all", "answers"] = Field(
        "all", description="sample tokens that the loss includes: all, or only answers"
    )
    lengths: list[int] | None = Field(
        None,
        min_length=1,
        description=(
            "sample lengths in tokens, one sampled at random per block; default: a whole block"
        ),
    )
    haystack: list[str] = Field([], description="files and folders of essays to hide needles in")

    def tasks_of(self, known: list[str]) -> list[str]:
        """Return the tasks named, or all ``known`` tasks, which need no file of questions."""
        return known if self.tasks == ALL_TASKS else list(self.tasks)


class MixConfig(schema.Section):
    """Mix other samples into the training text; evaluations of training runs measure on text alone."""

    ruler: RulerMix = Field(description="samples of RULER")


class DataConfig(schema.Section):
    """Choose the text, and how to cut it into blocks."""

    sources: list[str | SourceConfig] = Field(
        min_length=1,
        description="files, folders, stdlib, installed, or sections with path or dataset",
    )
    block_size: int = Field(
        BLOCK_SIZE, ge=2, le=limits.MAX_BLOCK_SIZE, description="tokens per block"
    )
    heldout: float = Field(
        0.05, gt=0.0, lt=1.0, description="share of documents held out, chosen by content hash"
    )
    max_heldout_tokens: int = Field(
        HELDOUT_TOKENS,
        ge=1,
        le=limits.MAX_WHOLE,
        description="maximum number of held-out tokens, taken from all held-out documents",
    )
    bos: Bos = Field(
        AUTO,
        description=(
            "begin every block with a BOS token; auto: with whatever the tokenizer puts before a "
            "text"
        ),
        # Hashes and records of recipes stay as before the key existed
        exclude_if=lambda bos: bos == AUTO,
    )
    separator: str = Field(
        AUTO,
        min_length=1,
        description=(
            "what stands after a document: none, eos, bos, eos+bos or another token; auto: "
            "what the dense model knows best, measured; eos for a new model"
        ),
        exclude_if=lambda separator: separator == AUTO,
    )
    documents: Literal["joined", "separate"] = Field(
        JOINED,
        description=(
            "whether tokens see earlier documents of their block (joined), or only their own, "
            "in which positions start again (separate)"
        ),
        exclude_if=lambda documents: documents == JOINED,
    )
    mix: MixConfig | None = Field(
        None, description="synthetic samples to mix into the training text"
    )

    @model_validator(mode="after")
    def _fitting_samples(self) -> "DataConfig":
        lengths = [] if self.mix is None else self.mix.ruler.lengths or []
        if any(not 1 <= length <= self.block_size for length in lengths):
            raise ValueError(
                f"mix.ruler.lengths: lengths must be 1 to {self.block_size} tokens, the block size"
            )
        return self
