"""Recipes: one YAML file says which model, which text, how to train it and how to gate it.

Parsed strictly: an unknown key, a wrong type or a value out of range is an error that names the file, the key, what
was expected and what was found.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from spkv_nas.files import read_yaml, validate
from spkv_nas.ladder import find_level, ladder


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SourceConfig(_Section):
    """A text source with options; exactly one of ``path`` and ``dataset``."""

    path: str | None = None
    dataset: str | None = Field(None, description="a data set of the Hugging Face hub or cache")
    name: str | None = Field(None, description="the data set's configuration")
    split: str | None = Field(None, description="the data set's split; train by default")
    text_field: str | None = None
    domain: str | None = None
    domain_field: str | None = None
    max_documents: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_origin(self) -> SourceConfig:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("a source has either 'path' or 'dataset'")
        return self


class ModelConfig(_Section):
    """Either ``path`` (a Hugging Face decoder) or ``config`` (a Hugging Face config for a new one)."""

    path: str | None = None
    config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either 'path' or 'config'")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("'config' needs 'model_type', for example llama")
        return self


class TokenizerConfig(_Section):
    """Either ``path`` (a tokenizer folder or id) or ``vocab_size`` (a BPE trained on the corpus)."""

    path: str | None = None
    vocab_size: int | None = Field(None, ge=260)

    @model_validator(mode="after")
    def _one_origin(self) -> TokenizerConfig:
        if (self.path is None) == (self.vocab_size is None):
            raise ValueError("give either 'path' or 'vocab_size'")
        return self


class DataConfig(_Section):
    """Text and how it is cut."""

    sources: list[str | SourceConfig] = Field(min_length=1)
    block_size: int = Field(512, ge=2, description="tokens per block")
    heldout: float = Field(0.05, gt=0.0, lt=1.0, description="share of documents, by content hash")
    max_heldout_tokens: int = Field(500_000, ge=1)


class DenseConfig(_Section):
    """The stable phase of the dense model."""

    steps: int = Field(3000, ge=1)
    batch_size: int = Field(8, ge=1, description="blocks per step")
    learning_rate: float = Field(2e-3, gt=0.0)
    warmup_steps: int = Field(100, ge=0)
    weight_decay: float = Field(0.1, ge=0.0)
    max_grad_norm: float = Field(1.0, gt=0.0)


class BranchConfig(_Section):
    """The decay phase, the same for every branch."""

    steps: int = Field(1000, ge=1)
    batch_size: int = Field(8, ge=1, description="blocks per step")
    learning_rate: float = Field(2e-3, gt=0.0)
    warmup_steps: int = Field(0, ge=0)
    final_learning_rate: float = Field(0.01, ge=0.0, le=1.0, description="share of the peak")
    weight_decay: float = Field(0.1, ge=0.0)
    max_grad_norm: float = Field(1.0, gt=0.0)


class GatesConfig(_Section):
    """Gates and how they learn (paper: window 128, bias 5, multiplier 5, weight decay 0.1, soft 75 %)."""

    window: int = Field(128, ge=1)
    tau: float = Field(0.5, ge=0.0, le=1.0)
    hidden_size: int | None = Field(None, ge=1)
    bias: float = 5.0
    learning_rate_multiplier: float = Field(5.0, gt=0.0)
    weight_decay: float = Field(0.1, ge=0.0)
    soft_fraction: float = Field(0.75, ge=0.0, le=1.0)
    anneal_steps: int = Field(0, ge=0)
    start_from: str | None = Field(None, description="a checkpoint whose predictors to start from")


class EvaluationConfig(_Section):
    """Held-out evaluation."""

    batch_size: int = Field(8, ge=1)


class Recipe(_Section):
    """A whole recipe. ``dense: null`` says that the model at ``model.path`` is the dense checkpoint.

    ``model`` may be the name of a level (``spkv_nas.ladder``): its config and hyperparameters then stand wherever the
    recipe says nothing else, and the parsed recipe holds them all.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0)
    model: ModelConfig
    tokenizer: TokenizerConfig | None = None
    data: DataConfig
    dense: DenseConfig | None = None
    branch: BranchConfig = BranchConfig()
    gates: GatesConfig = GatesConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint_every: int = Field(200, ge=1)
    micro_batch_size: int | None = Field(None, ge=1, description="blocks per forward and backward pass")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="of the matrix products in training")

    @model_validator(mode="before")
    @classmethod
    def _from_level(cls, data: Any) -> Any:
        name = data.get("model") if isinstance(data, dict) else None
        return ladder()[name].recipe(data) if isinstance(name, str) and name in ladder() else data

    @field_validator("model", mode="before")
    @classmethod
    def _known_level(cls, model: Any) -> Any:
        return find_level(model) if isinstance(model, str) else model

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.model.config is not None and self.dense is None:
            raise ValueError("a new model (model.config) needs a 'dense' section that trains it")
        if self.model.path is not None and self.dense is not None:
            raise ValueError("with model.path the model is the dense checkpoint: leave 'dense' out")
        if self.model.config is not None and self.tokenizer is None:
            raise ValueError("a new model (model.config) needs a 'tokenizer'")
        for name, phase in (("dense", self.dense), ("branch", self.branch)):
            size = self.micro_batch_size
            if size is not None and phase is not None and phase.batch_size > size and phase.batch_size % size:
                raise ValueError(f"micro_batch_size {size} does not divide {name}.batch_size {phase.batch_size}")
        return self

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Read and check a recipe file. Raises ``UserError``."""
        return validate(cls, read_yaml(path, "recipe"), f"recipe {path}")

    def content_hash(self, *sections: str) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the recipe, or of some of its sections."""
        data = self.model_dump(mode="json", include=set(sections) if sections else None)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def warnings(self) -> list[str]:
        """What will probably disappoint, in plain sentences."""
        gates, branch = self.gates, self.branch
        soft_steps = gates.soft_fraction * branch.steps
        # A cosine decay has a mean of about one half; its first 75 % has 0.63.
        reach = gates.learning_rate_multiplier * branch.learning_rate * soft_steps * 0.63
        if gates.start_from is None and gates.soft_fraction > 0 and reach < gates.bias:
            return [
                f"gates can hardly close: over {soft_steps:.0f} soft steps a logit travels about {reach:.2f}, less "
                f"than the bias of {gates.bias}\nmore branch.steps, a larger gates.learning_rate_multiplier or a "
                "smaller gates.bias would help"
            ]
        return []
