"""Plant attention sinks in the embedded model, as pretrained models have them: Qwen2 with a massive activation on BOS.

The embedding of BOS is one channel of 300, which is all that RMSNorm leaves of it. Every layer's keys have that channel
on the slowest rotary pair, the bias of the queries meets it there, and the values have none of it. The untrained model
already has strong sinks; after 120 steps of training its predictions need them.

``python tests/planted.py strong FOLDER`` writes such a model and its text (``write``); ``text`` writes the text alone.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import processors
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

import spkv_nas
from spkv_nas.data.blocks import build_blocks

WEAK, STRONG = 1.2, 2.6  # bias of the queries
BLOCK, _STEPS, _BATCH, _RATE = 512, 120, 4, 6e-4
_ACTIVATION, _KEY, _HELD_OUT = 300.0, 6.0, 120


def planted(bias: float) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerBase]:
    """Return the model before training, in float32, and its tokenizer, which begins texts with BOS."""
    source, tokenizer = spkv_nas.load("embedded:dense")
    # Copy the weights, with a row for BOS
    config = source.config.to_dict()
    shared = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_parameters",
    )  # fmt: skip
    bos = source.config.vocab_size
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=bos + 1, tie_word_embeddings=False, **{key: config[key] for key in shared}
        )
    )
    weights = {name: tensor.float() for name, tensor in source.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = weights.get(name, weights["model.embed_tokens.weight"])[:bos]
        weights[name] = torch.cat([rows, torch.zeros(1, rows.shape[1])])
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert all(name.endswith("bias") for name in missing)
    assert not unexpected
    plant(model, bos, bias)
    # Begin texts with BOS
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    assert tokenizer.bos_token_id == bos
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    return model.eval(), tokenizer


@torch.no_grad()
def plant(model: Qwen2ForCausalLM, bos: int, bias: float) -> None:
    """Plant sinks on the token ``bos`` in place, of any Qwen2; no training is needed for them to be strong."""
    size = model.config.head_dim
    model.model.embed_tokens.weight[bos] = 0.0
    model.model.embed_tokens.weight[bos, 0] = _ACTIVATION
    for layer in model.model.layers:
        attention, scale = layer.self_attn, float(layer.input_layernorm.weight[0])
        # BOS after RMSNorm
        normed = math.sqrt(model.config.hidden_size) * (scale if abs(scale) > 0.05 else 0.05)
        pair = size // 2 - 1  # slowest rotary pair
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.bias.zero_()
        attention.k_proj.weight[:, 0] = attention.v_proj.weight[:, 0] = 0.0
        attention.k_proj.weight[pair::size, 0] = _KEY / normed
        attention.q_proj.bias[pair::size] = bias * math.sqrt(size)
        layer.mlp.gate_proj.weight[:, 0] = layer.mlp.up_proj.weight[:, 0] = 0.0


def texts() -> tuple[list[str], list[str]]:
    """Return the files of the standard library for training, and those held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in sorted(folder.rglob("*.py"))
        if not {"site-packages", "test", "tests"} & {*file.parts}
    ]
    Random(0).shuffle(files)
    contents = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return contents[:-_HELD_OUT], contents[-_HELD_OUT:]


def train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Train the planted model in place; minutes on a CPU."""
    blocks = build_blocks(
        texts()[0], tokenizer, BLOCK, max_tokens=4 * _STEPS * _BATCH * BLOCK
    ).tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0, betas=(0.9, 0.95))
    rng = np.random.default_rng(0)
    model.train()
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = (
                _RATE
                * min(1.0, (step + 1) / 10)
                * max(0.02, 0.5 + 0.5 * math.cos(math.pi * step / _STEPS))
            )
        tokens = torch.from_numpy(blocks[rng.integers(len(blocks), size=_BATCH)].astype(np.int64))
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def write(folder: Path, bias: float) -> Path:
    """Write a trained planted model to ``folder/model``, and its text to ``folder/train`` and ``folder/heldout``."""
    torch.manual_seed(0)
    model, tokenizer = planted(bias)
    train(model, tokenizer)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_text(folder)
    return folder


def write_text(folder: Path) -> None:
    """Write the text for training to ``folder/train`` and the held-out one to ``folder/heldout``."""
    for name, contents in zip(("train", "heldout"), texts(), strict=True):
        (folder / name).mkdir(parents=True)
        for number, content in enumerate(contents):
            (folder / name / f"{number:04}.txt").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Write the embedded model with planted attention sinks, and its text."
    )
    parser.add_argument(
        "part",
        choices=("weak", "strong", "text"),
        help="strength of the sinks; text: the text alone",
    )
    parser.add_argument("folder", type=Path, help="new folder")
    options = parser.parse_args()
    if options.part == "text":
        write_text(options.folder)
    else:
        write(options.folder, {"weak": WEAK, "strong": STRONG}[options.part])
