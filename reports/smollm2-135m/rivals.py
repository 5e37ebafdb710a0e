"""Write layouts that others would choose, each with as much memory at 8,192 tokens, for ``study.py --layouts``.

    python rivals.py MODEL TEXT2048/select --memory 12.5 --out rivals

- swaa: whole global layers at a fixed period and ten first tokens for the others (Sliding Window Attention
  Adaptation, arXiv 2512.10411), with the two widths of windows that leave one layer in fifteen and in thirty global;
- retrieval-few-keys: the heads of highest retrieval score global, 16 first and 64 recent keys for the others
  (RLKV's local heads, arXiv 2510.08525; its own scores come from reinforcement learning);
- kvzip: the heads to which a key matters most when the model repeats its text (KVzip's scores of heads, arXiv
  2505.23416: the largest weight that a key of the text gets), with the window that takes 60 % of the memory;
- greedy-layers: whole layers, one by one that which lowers the NLL most;
- random: three draws of heads, with the window that takes 60 % of the memory.

Scores are measured on the first documents of TEXT, which ``text.py`` makes.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from study import text_blocks
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

import spkv_nas
from spkv_nas.artifacts.layout import Layout
from spkv_nas.contrib.signals.measure.retrieval import retrieval
from spkv_nas.cost.cache_cost import CacheCost
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import document_nll

_SINKS = 1  # of SmolLM2 (``study.py`` measures it)
_SWAA_SINKS = 10
_FEW_KEYS, _FEW_SINKS = 64, 16
_TYPICAL_PART = 0.6  # of the memory for the windows of local heads
_STEP = 16
_DRAWS = 3
_REPEATED = 1024  # tokens that the model repeats: all attention weights are kept
_GREEDY_TOKENS = 1024
_PROMPT = "\n\nRepeat the previous context:\n\n"
Scores = NDArray[np.float64]  # [L, Hkv]


def main() -> None:
    """Measure the scores and write the layouts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--memory", type=float, default=12.5, help="percent of the KV cache")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=1, help="of every domain")
    parser.add_argument(
        "--greedy", action="store_true", help="greedy-layers alone, which takes longest"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model, tokenizer = spkv_nas.load(options.model, dtype="float32")
    rivals = _Rivals(model, options.memory, options.context)
    blocks = text_blocks((model, tokenizer), options.text, 2048, options.documents)
    if options.greedy:
        short = text_blocks((model, tokenizer), options.text, _GREEDY_TOKENS, options.documents)
        layouts = {"greedy-layers": rivals.greedy_layers(short)}
    else:
        layouts = rivals.patterns()
        scores = retrieval(model, blocks, window=128, sinks=_SINKS).values
        layouts["retrieval-few-keys"] = rivals.by_scores(scores, _FEW_KEYS, _FEW_SINKS)
        scores = _kvzip_scores(model, tokenizer, blocks)
        layouts["kvzip"] = rivals.by_scores(scores, rivals.typical_window, _SINKS)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, layout in layouts.items():
        print(
            f"{options.memory:g}-{name}: {layout.num_global} global, {layout.description}",
            flush=True,
        )
        layout.write(options.out / f"{options.memory:g}-{name}.yaml")


def _kvzip_scores(model: PreTrainedModel, tokenizer: Tokenizer, blocks: TokenBlocks) -> Scores:
    """Return the largest weight that a key of a text gets while the model repeats the text, mean over texts."""
    prompt = tokenizer(_PROMPT, add_special_tokens=False).input_ids
    model.set_attn_implementation("eager")
    num_kv_heads = model.config.num_key_value_heads
    total = np.zeros((model.config.num_hidden_layers, num_kv_heads))
    for row in blocks.tokens:
        text = row[:_REPEATED].tolist()
        tokens = torch.tensor([[*text, *prompt, *text]])
        with torch.inference_mode():
            weights = model(tokens, output_attentions=True, logits_to_keep=1).attentions
        for layer, of_layer in enumerate(weights):
            of_text = of_layer[0, :, _REPEATED:, :_REPEATED].amax((1, 2))
            total[layer] += of_text.view(num_kv_heads, -1).amax(1).double().numpy()
    model.set_attn_implementation("sdpa")
    return total / len(blocks.tokens)


class _Rivals:
    """Layouts of a model within a memory."""

    def __init__(self, model: PreTrainedModel, percent: float, context: int) -> None:
        """Count the memory of a ``context``, of which layouts may take a ``percent``."""
        self._model = model
        config = model.config
        self._grid = (config.num_hidden_layers, config.num_key_value_heads)
        self._cost = CacheCost(context, 1, 1, config.head_dim, dtype="float32", sinks=_SINKS)
        self._limit = int(percent / 100.0 * self._cost.full(self._num_heads))
        self.typical_window = int(_TYPICAL_PART * percent / 100.0 * context) // _STEP * _STEP

    @property
    def _num_heads(self) -> int:
        """Return the number of KV heads."""
        return self._grid[0] * self._grid[1]

    def by_scores(self, scores: Scores, window: int, sinks: int) -> Layout:
        """Return the layout whose global heads, as many as fit, have the highest ``scores``."""
        cost = replace(self._cost, window=window, sinks=sinks)
        number = cost.num_global_within(self._limit, self._num_heads)
        mask = np.zeros(self._num_heads, dtype=bool)
        mask[np.argsort(-scores, axis=None)[:number]] = True
        return Layout.from_mask(mask.reshape(self._grid), window=window, sinks=sinks)

    def patterns(self) -> dict[str, Layout]:
        """Return the layouts that need no measurement."""
        layouts = {}
        for period in (15, 30):
            layers = range(period - 1, self._grid[0], period)
            layouts[f"swaa-1-in-{period}"] = self._whole_layers(layers, _SWAA_SINKS)
        for seed in range(_DRAWS):
            scores = np.random.default_rng(seed).random(self._grid)
            layouts[f"random-{seed}"] = self.by_scores(scores, self.typical_window, _SINKS)
        return layouts

    def _whole_layers(self, layers: range | list[int], sinks: int) -> Layout:
        """Return the layout with these global layers, and the widest window that fits."""
        mask = np.zeros(self._grid, dtype=bool)
        mask[list(layers)] = True
        num_global = int(mask.sum())
        widest = _STEP
        while (
            replace(self._cost, window=widest + _STEP, sinks=sinks).total(
                num_global, self._num_heads
            )
            <= self._limit
        ):
            widest += _STEP
        return Layout.from_mask(mask, window=widest, sinks=sinks)

    def greedy_layers(self, blocks: TokenBlocks) -> Layout:
        """Return the layout with two whole layers, the second chosen beside the first, by the NLL of ``blocks``.

        The window of the others is an eighth of the text, as 1,024 keys are of the context.
        """
        chosen: list[int] = []
        window = _GREEDY_TOKENS // 16
        for _ in range(2):
            losses = {}
            for layer in range(self._grid[0]):
                if layer in chosen:
                    continue
                mask = np.zeros(self._grid, dtype=bool)
                mask[[*chosen, layer]] = True
                layout = Layout.from_mask(mask, window=window, sinks=_SINKS)
                with spkv_nas.layout_applied(self._model, layout):
                    losses[layer] = document_nll(self._model, blocks, batch_size=1).mean
            chosen.append(min(losses, key=losses.__getitem__))
            print(f"greedy layer {chosen[-1]}: NLL {losses[chosen[-1]]:.4f}", flush=True)
        return self._whole_layers(sorted(chosen), _SINKS)


if __name__ == "__main__":
    main()
