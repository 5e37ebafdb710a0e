"""Shared test models: tiny, random, offline."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before transformers, which imports Triton

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.data.tokenizer import train_bpe
from spkv_nas.recipe import Recipe

torch.set_num_threads(1)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"head_dim": 8, "sliding_window": None},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "olmo2": {},
    "phi3": {"pad_token_id": 0, "sliding_window": None},
    "granite": {},
    "smollm3": {"pad_token_id": 0, "no_rope_layers": [1, 1, 1, 0]},
}


def tiny_model(family: str = "llama", **options: Any) -> PreTrainedModel:
    """A random decoder: 4 layers, 4 query and 2 KV heads of size 8, in evaluation mode."""
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **FAMILIES.get(family, {}),
            **options,
        },
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    """int64 [2, 24]."""
    return torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE of 260 entries."""
    return train_bpe(["the quick brown fox jumps over the lazy dog"] * 3, 260)


RECIPE = """\
name: tiny
model:
  config: {model_type: llama, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 4,
           num_key_value_heads: 2, tie_word_embeddings: true}
tokenizer: {vocab_size: 280}
data: {sources: [text], block_size: 32, heldout: 0.3, max_heldout_tokens: 4000}
dense: {steps: 6, batch_size: 4, learning_rate: 1e-2, warmup_steps: 2}
branch: {steps: 8, batch_size: 4, learning_rate: 1e-2}
gates: {window: 8, hidden_size: 8, bias: 0.2, learning_rate_multiplier: 10.0}
checkpoint_every: 3
"""


def write_project(folder: Path, recipe: str = RECIPE) -> Path:
    """A recipe for a tiny model on forty short documents in two domains, in a new folder; the recipe's file."""
    for domain in ("prose", "code"):
        (folder / "text" / domain).mkdir(parents=True)
        for number in range(20):
            words = " ".join(f"{domain}{(number * i) % 17} returns" for i in range(60))
            (folder / "text" / domain / f"{number}.txt").write_text(f"document {number}: {words}\n")
    file = folder / "recipe.yaml"
    file.write_text(recipe)
    return file


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """The file of ``write_project``, in a folder of its own."""
    return write_project(tmp_path / "project")


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    """The recipe of ``recipe_file``."""
    return Recipe.read(recipe_file)


BLOCK = 32  # tokens of a block of the next two


@pytest.fixture
def blocks() -> TokenBlocks:
    """9 blocks of 32 tokens; 12 documents of 24 tokens, so that documents cross blocks."""
    tokens = np.random.default_rng(0).integers(3, 97, size=(9, BLOCK)).astype(np.int32)
    owner = np.repeat(np.arange(12, dtype=np.int32), 24).reshape(9, BLOCK)
    return TokenBlocks(tokens, owner, tuple(DocumentInfo(str(i), "all", str(i)) for i in range(12)))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Ten short documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(10):
        words = " ".join(f"fox{(number * i) % 17} jumps" for i in range(20))
        (folder / f"{number}.txt").write_text(f"document {number}: {words}\n")
    return folder
