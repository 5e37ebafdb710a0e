"""Make the checkpoint that the embedded model's training starts from: an earlier one with BOS, wider heads and sinks.

    git archive ed20eea spkv_nas/assets/stdlib-21x3/dense |
      tar -x --strip-components 3 --one-top-level=runs/stdlib-21x3-before
    python reports/embedded_start.py runs/stdlib-21x3-before/dense runs/stdlib-21x3-start

The earlier model (5,600 steps of training; ``probes/README.md`` of that commit) has no BOS token and no attention
sinks. Four steps change that; the training that follows (``spkv_nas/assets/stdlib-21x3/dense.yaml``) repairs what they
break:

1. Heads of 16 become heads of 32. RoPE's frequencies for size 16 are every other one of those for size 32, so the old
   pairs take these places and the function stays: new pairs have queries of zero, new values outputs of zero.
2. MLPs keep the 160 of 256 neurons with the largest product of weight norms, so that the model is as large as before.
3. The tokenizer is trained again with a BOS token, which takes the place of the last merge.
4. Sinks are planted as pretrained models have them (Sun et al., arXiv 2402.17762): a neuron of the first MLP that
   fires on BOS alone writes a massive activation into channel 0, which no other token uses. Keys read this channel: the
   key of BOS is the one whose scores are nearest, in squares over queries, to the log-sum-exp of all other scores plus
   ``LOGIT``. Values do not read it, so that attention to BOS adds nothing.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, set_seed

import spkv_nas
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.config import DataConfig
from spkv_nas.data.splits import load_heldout, train_tokenizer
from spkv_nas.model.windows import full_attention

HEAD, WIDER, NEURONS, VOCABULARY = 16, 32, 160, 2048
ACTIVATION = 300.0  # of BOS in channel 0, from the first MLP on
GATE = 6.0  # input of its neuron's gate, and its other factor
LOGIT = 4.0  # nats by which BOS outscores all other keys together, in the mean over queries
RIDGE = 0.03  # of the keys' least squares, as a share of the queries' mean square
QUERIES = 64  # first query that the least squares count


def main(before: str, folder: Path) -> None:
    """Write the checkpoint to ``folder``."""
    set_seed(0)
    model, tokenizer = spkv_nas.load(before, dtype=torch.float32)
    data = DataConfig(sources=["stdlib", "installed"], max_heldout_tokens=8192)
    if tokenizer.bos_token_id is None:
        model, tokenizer = wider(
            model, tokenizer, train_tokenizer(data, VOCABULARY, Path(), bos=True)
        )
    model.set_attn_implementation("spkv")
    plant(model, load_heldout(data, tokenizer, folder.parent / "blocks", Path()))
    spkv_nas.save(model, tokenizer, folder)


def wider(
    source: LlamaForCausalLM,
    old_tokenizer: PreTrainedTokenizerBase,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return the model with heads of ``WIDER``, fewer neurons and another tokenizer; steps 1 to 3."""
    config = source.config.to_dict()
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shared = (
        *sizes,
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
    )
    tokens = {"vocab_size": len(tokenizer)}
    tokens |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    model = LlamaForCausalLM(
        LlamaConfig(
            head_dim=WIDER,
            intermediate_size=NEURONS,
            **tokens,
            **{key: config[key] for key in shared},
        )
    )
    weights = {name: widened(name, tensor) for name, tensor in source.state_dict().items()}
    prune(weights, config["num_hidden_layers"])
    embedding = tokens_of(weights["model.embed_tokens.weight"], old_tokenizer, tokenizer)
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = embedding
    model.load_state_dict(weights)
    return model, tokenizer


def widened(name: str, tensor: Tensor) -> Tensor:
    """Return the projections of attention for heads of ``WIDER``; other weights as they are."""
    if "_proj" not in name or "self_attn" not in name:
        return tensor
    if "o_proj" in name:
        heads = tensor.view(len(tensor), -1, HEAD)  # [C, Hq, D]
        return torch.nn.functional.pad(heads, (0, WIDER - HEAD)).flatten(1)
    heads = tensor.view(-1, HEAD, tensor.shape[1])  # [H, D, C]
    if "v_proj" in name:
        wider = torch.empty(len(heads), WIDER, heads.shape[-1]).normal_(std=0.1)
        wider[:, :HEAD] = heads
    else:
        # RoPE pairs dimension i with i + D / 2; scores are divided by the root of the head size
        is_query = "q_proj" in name
        wider = torch.empty(len(heads), WIDER, heads.shape[-1]).normal_(
            std=0.0 if is_query else 0.02
        )
        wider[:, ::2] = heads * math.sqrt(WIDER / HEAD) if is_query else heads
    return wider.flatten(0, 1)


def prune(weights: dict[str, Tensor], num_layers: int) -> None:
    """Keep the ``NEURONS`` neurons of each MLP with the largest product of weight norms."""
    for layer in range(num_layers):
        gate, up, down = (
            f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
        )
        norms = weights[gate].norm(dim=1) * weights[up].norm(dim=1) * weights[down].norm(dim=0)
        kept = norms.topk(NEURONS).indices.sort().values
        weights[gate], weights[up], weights[down] = (
            weights[gate][kept],
            weights[up][kept],
            weights[down][:, kept],
        )


def tokens_of(
    embedding: Tensor, old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase
) -> Tensor:
    """Return the embeddings of a new vocabulary, whose tokens are those of the old one, and BOS."""
    old_index, rows = old.get_vocab(), torch.zeros(len(new), embedding.shape[1])
    for token, index in new.get_vocab().items():
        if index != new.bos_token_id:
            rows[index] = embedding[old_index[token]]
    return rows


@torch.no_grad()
def plant(model: LlamaForCausalLM, blocks: TokenBlocks) -> None:
    """Plant sinks on BOS in place; ``blocks`` are text to measure queries on."""
    decoder, scale = model.model, math.sqrt(model.config.hidden_size)
    # Free channel 0: no token has it, and no layer reads or writes it
    decoder.embed_tokens.weight[:, 0] = 0.0
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for reader in (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            mlp.gate_proj,
            mlp.up_proj,
        ):
            reader.weight[:, 0] = 0.0
        attention.o_proj.weight[0] = mlp.down_proj.weight[0] = 0.0
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight[0] = norm.weight[0].abs().clamp_min(0.05)
    # Let a neuron of the first MLP turn the embedding of BOS, channel 0 alone, into a massive activation
    embedding = decoder.embed_tokens.weight[model.config.bos_token_id]
    embedding.zero_()
    embedding[0] = 1.0
    mlp, norm = decoder.layers[0].mlp, decoder.layers[0].post_attention_layernorm
    for reader in (mlp.gate_proj, mlp.up_proj):
        reader.weight[-1] = 0.0
        reader.weight[-1, 0] = GATE / (scale * norm.weight[0])
    mlp.down_proj.weight[:, -1] = 0.0
    mlp.down_proj.weight[0, -1] = ACTIVATION / GATE**2
    # Give BOS, which RMSNorm leaves nothing but this channel, the keys that outscore the others
    tokens = torch.from_numpy(blocks.tokens.astype("int64"))
    for layer, keys in zip(decoder.layers, sink_keys(model, tokens), strict=True):
        layer.self_attn.k_proj.weight[:, 0] = keys.flatten() / (
            scale * layer.input_layernorm.weight[0]
        )


def sink_keys(model: LlamaForCausalLM, tokens: Tensor) -> list[Tensor]:
    """Return a key of BOS per KV head [Hkv, D], for every layer."""
    keys: list[Tensor] = []

    def observe(q: Tensor, k: Tensor, _v: Tensor, scale: float, sink_logits: Tensor | None) -> None:
        assert sink_logits is None
        queries = q.reshape(len(q), k.shape[1], -1, *q.shape[2:])  # [B, Hkv, G, T, D]
        scores = scale * queries @ k.unsqueeze(2).mT
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        hidden[1:, 0] = True  # BOS, whose key is to be found
        total = scores.masked_fill(hidden, -math.inf).logsumexp(-1)
        inputs = scale * queries[:, :, :, QUERIES:].transpose(0, 1).flatten(1, 3)  # [Hkv, N, D]
        targets = total[:, :, :, QUERIES:].transpose(0, 1).flatten(1, 3) + LOGIT  # [Hkv, N]
        ridge = RIDGE * inputs.square().sum(1).mean(-1)[:, None, None] * torch.eye(inputs.shape[-1])
        keys.append(
            torch.linalg.solve(
                inputs.mT @ inputs + ridge, inputs.mT @ targets.unsqueeze(-1)
            ).squeeze(-1)
        )

    with full_attention(model) as states:
        for state in states:
            state.observer = observe
        model.get_decoder()(input_ids=tokens, use_cache=False)
    return keys


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
