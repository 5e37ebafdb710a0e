"""The section ``data`` of a recipe: which text, and how it is cut."""

from __future__ import annotations

from pydantic import Field, model_validator

from spkv_nas.base.limits import MOST_BLOCK_SIZE, MOST_WHOLE
from spkv_nas.base.schema import Section

BLOCK_SIZE = 512  # tokens, by default


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
        if (self.path is None) == (self.dataset is None):
            raise ValueError("a source has either 'path' or 'dataset'")
        return self


class DataConfig(Section):
    """Text and how it is cut."""

    sources: list[str | SourceConfig] = Field(min_length=1)
    block_size: int = Field(BLOCK_SIZE, ge=2, le=MOST_BLOCK_SIZE, description="tokens per block")
    heldout: float = Field(0.05, gt=0.0, lt=1.0, description="share of documents, by content hash")
    max_heldout_tokens: int = Field(500_000, ge=1, le=MOST_WHOLE)
