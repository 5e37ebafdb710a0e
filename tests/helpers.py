"""Shared helpers: tiny random models, a small project, tables, and how to run a command that must fail."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas import GateConfig, SPKVCache, attach_gates, set_gate_mode
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.files import write_atomic
from spkv_nas.base.progress import Announce, Display, Reporter, silent
from spkv_nas.cli import main
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.gates import predictors

if TYPE_CHECKING:
    from spkv_nas.report.chart import Chart, Panels
    from spkv_nas.training.branches import Branch
    from spkv_nas.training.corpus import Corpus
    from spkv_nas.training.recipe import Recipe
    from spkv_nas.training.variants import Variant

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"head_dim": 8, "sliding_window": None},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "olmo2": {},
    "phi3": {"pad_token_id": 0, "sliding_window": None},
    "granite": {},
    "smollm3": {"pad_token_id": 0, "no_rope_layers": [1, 1, 1, 0]},
}
GPT_OSS: dict[str, Any] = {  # learned sinks, a mixture of experts, and every other layer sliding
    "head_dim": 8, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def tiny_model(family: str = "llama", **options: Any) -> PreTrainedModel:
    """Make a random decoder: 4 layers, 4 query and 2 KV heads of size 8, in evaluation mode."""
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
            **{**FAMILIES, "gpt_oss": GPT_OSS}.get(family, {}),
            **options,
        },
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def sharpen_attention(model: PreTrainedModel, factor: float = 12.0) -> PreTrainedModel:
    """Make a random model's attention far from uniform in place, so that a wrong window, position or sink shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_()
            elif "self_attn" in name and parameter.ndim == 2:
                parameter *= factor
    return model


def save_with_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write a checkpoint with a tokenizer that a class of the model's type, such as Qwen2Tokenizer, may change."""
    tokenizer.save_pretrained(folder)
    save(model, None, folder)


RECIPE = """\
name: tiny
model:
  config: {model_type: llama, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 4,
           num_key_value_heads: 2, tie_word_embeddings: true}
tokenizer: {vocab_size: 280}
data: {sources: [text], block_size: 32, heldout: 0.3, max_heldout_tokens: 1600}
dense: {steps: 6, batch_size: 4, learning_rate: 1e-2, warmup_steps: 2}
branch: {steps: 8, batch_size: 4, learning_rate: 1e-2}
gates: {window: 8, hidden_size: 8, bias: 0.2, learning_rate_multiplier: 10.0}
checkpoint_every: 3
precision: float32
"""


def write_project(folder: Path, recipe: str = RECIPE, *, words: int = 60) -> Path:
    """Write a recipe for a tiny model on forty short documents in two domains to a new folder; return its file."""
    for domain in ("prose", "code"):
        (folder / "text" / domain).mkdir(parents=True)
        for number in range(20):
            text = " ".join(f"{domain}{(number * i) % 17} returns" for i in range(words))
            (folder / "text" / domain / f"{number}.txt").write_text(f"document {number}: {text}\n")
    file = folder / "recipe.yaml"
    file.write_text(recipe)
    return file


@dataclass(frozen=True)
class Recorder(Reporter):
    """Reporter that hands its messages to functions instead of logging them."""

    announced: Announce = silent
    cautioned: Announce = silent

    def announce(self, line: str) -> None:
        self.announced(line)

    def caution(self, line: str | None) -> None:
        if line is not None:
            self.cautioned(line)


class MessageLog:
    """Records the lines that work reports, and by title the values of its bars."""

    def __init__(self) -> None:
        self.announced: list[str] = []
        self.cautioned: list[str] = []
        self.bars: dict[str, list[tuple[int, int]]] = {}
        self.reporter = Recorder(
            self._bar, announced=self.announced.append, cautioned=self.cautioned.append
        )

    @contextmanager
    def _bar(self, title: str) -> Iterator[Display]:
        values = self.bars.setdefault(title, [])
        yield lambda done, total, note="", *, unit="", left=None: values.append((done, total))


BLOCK = 32  # tokens of a block of the fixture ``blocks``


def fails(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run a command that must fail with a user error; return its message."""
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in arguments])
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return " ".join(message.split())


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(
    *arguments: str | Path, processes: int = 2, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """Run a script or ``-m module`` in several processes."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
    ]
    command += ["--nproc-per-node", str(processes), *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as run:
        try:
            out, err = run.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            run.terminate()  # torchrun ends the processes that it started
            out, err = run.communicate()
    return subprocess.CompletedProcess(command, run.returncode, out, err)


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits


def equal_up_to_rounding(
    actual: Tensor | np.ndarray, expected: Tensor | np.ndarray, units: float = 64
) -> bool:
    """Return whether two computations of the same numbers agree up to the order of their sums.

    A sum of rounded numbers depends on its order. Kernels choose that by the processor's instructions, the shapes, the
    number of threads and where in memory a matrix begins, which differs between weights that were drawn and weights of
    a file: with AVX2 alone, a restored model computes other last digits than the one that was saved. Each sum of some
    hundred products is off by a few roundings of its largest term, and few layers pass them on. Numbers that are only
    copied (weights of a file, token ids) are compared by ``torch.equal``.

    Args:
        actual: Any shape, float32 or shorter; float64 of an array holds sums of float32.
        expected: The same shape and dtype.
        units: Largest difference, in roundings of the largest expected number: 2^-23 of it in float32.
    """
    one, other = torch.as_tensor(actual), torch.as_tensor(expected)
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    eps = max(torch.finfo(one.dtype).eps, torch.finfo(torch.float32).eps)
    largest = float(other.detach().abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=units * eps * largest)


def check_generation(model: PreTrainedModel, lengths: tuple[int, ...] = (20, 7, 13)) -> None:
    """Check that generation with the cache equals whole passes: left padding, decoding, and prompts in chunks."""
    longest = max(lengths)
    ids = torch.randint(3, 300, (len(lengths), longest), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    options = {
        "max_new_tokens": 10,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": mask.long(),
    }
    record = {"return_dict_in_generate": True, "output_logits": True}
    actual = model.generate(ids, past_key_values=SPKVCache(model), **record, **options)
    for row, length in enumerate(lengths):
        sequence = actual.sequences[row, longest - length :]
        expected = logits(model, sequence[None, :-1])[0, length - 1 :]
        assert torch.allclose(
            torch.stack(actual.logits, 1)[row], expected, atol=1e-4 * float(expected.abs().max())
        )
    chunked = model.generate(ids, past_key_values=SPKVCache(model), prefill_chunk_size=6, **options)
    assert torch.equal(chunked, actual.sequences)


def recompute_activations(model: PreTrainedModel) -> None:
    """Enable transformers' activation checkpointing, under its name in the installed version."""
    current = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.23
    (current or model.gradient_checkpointing_enable)()


def scatter_gates(model: PreTrainedModel) -> None:
    """Make the gates differ by token, so that a wrong gate shows."""
    torch.manual_seed(1)
    for module in predictors(model).values():
        torch.nn.init.normal_(module.down.weight, std=2.0)
        torch.nn.init.zeros_(module.down.bias)


def gated(family: str = "llama") -> PreTrainedModel:
    """Make a tiny model with scattered gates: a copy of one, which takes a tenth of the time."""
    model, random_state = _gated(family)
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)


@cache
def _gated(family: str) -> tuple[PreTrainedModel, Tensor]:
    """Make the model of ``gated``; return it, and the state of the random generator after that."""
    model = tiny_model(family, vocab_size=300)
    attach_gates(model, GateConfig(window=6, hidden_size=16, tau=0.4))
    scatter_gates(model)
    return model, torch.get_rng_state()


def all_logits(model: PreTrainedModel, blocks: TokenBlocks, tau: float) -> np.ndarray:
    """Return utility logits [N, L, Hkv, T] with hard gates at tau."""
    seen: list[torch.Tensor] = []
    handles = [
        p.register_forward_hook(lambda _m, _a, out: seen.append(out))
        for p in predictors(model).values()
    ]
    set_gate_mode(model, "hard", tau)
    with torch.no_grad():
        model(input_ids=torch.from_numpy(blocks.tokens.astype(np.int64)))
    for handle in handles:
        handle.remove()
    return torch.stack(seen, 1).numpy()


def make_table(density: object, domains: tuple[str, ...] = ("all",)) -> HeadScores:
    """Make a table from ``density`` [L, Hkv], or [P, L, Hkv] with its domains."""
    grid = np.asarray(density, dtype=float)
    grid = grid[None] if grid.ndim == 2 else grid
    domain, layer, head = (axis.ravel() for axis in np.indices(grid.shape))
    rows = pd.DataFrame({"layer": layer, "kv_head": head, "score": grid.ravel()}).assign(
        domain=[domains[i] for i in domain],
        num_tokens=1000,
        num_documents=2,
        standard_error=math.nan,
    )
    return HeadScores("p", rows, window=8)


DENSITY = np.array([[1.0, 0.0], [0.2, 0.6], [0.1, 0.3], [0.7, 0.5]])


def make_domain_table(
    domains: tuple[str, ...] = ("all",), density: np.ndarray = DENSITY, **changes: Any
) -> HeadScores:
    rows = [
        {
            "layer": layer,
            "kv_head": head,
            "domain": domain,
            "score": density[layer, head],
            "num_tokens": 2000 * (number + 1),
            "num_documents": 10,
            "standard_error": 0.01 if number else np.nan,
        }
        for number, domain in enumerate(domains)
        for layer, head in np.ndindex(density.shape)
    ]
    return HeadScores("test", pd.DataFrame(rows), tau=0.5, window=8, **changes)


@contextmanager
def unsaved_pictures(*, drawn: bool = True) -> Iterator[None]:
    """Draw pictures without settling their margins, and write empty files: both take most of a report's time.

    Without ``drawn``, only the charts in the page are drawn, and those of files are not.
    """

    def save_empty(folder: Path, chart: Chart | Panels) -> None:
        for suffix in ("png", "svg", "pdf"):
            write_atomic(folder / f"{chart.name}.{suffix}", b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spkv_nas.report.plot._bytes", lambda *_, **__: b"")
        patch.setattr("spkv_nas.report.plot.Picture.draw_without_rendering", lambda _: None)
        if not drawn:
            patch.setattr("spkv_nas.report.plot.save_chart", save_empty)
        yield


VOID = {"meta", "path", "rect", "circle", "line", "polyline", "stop", "link", "img", "br", "input"}


def make_layouts(*names: str) -> dict[str, Layout]:
    grids = [("GL", "LG", "LL", "LL"), ("LL", "LL", "LL", "GG"), ("LG", "LL", "GL", "LL")]
    return {
        name: Layout(heads, 8, name, {"seed": None})
        for name, heads in zip(names, grids, strict=False)
    }


class Page(HTMLParser):
    """Parses elements with their attributes and texts, and checks that tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.stack: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, [])
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack:
            self.texts[self.stack[-1]].append(data)

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


def train_branch(
    recipe: Recipe,
    corpus: Corpus,
    dense: Path,
    folder: Path,
    variant: Variant,
    *,
    seed: int | None = None,
    **options: Any,
) -> Branch:
    """Train a branch of the dense checkpoint in ``folder``; ``options`` are those of ``BranchContext``."""
    from spkv_nas.training.branches import BranchContext  # loads the trainer, which few tests need

    return BranchContext(recipe, corpus, dense, folder.parent, **options).train(
        variant, seed, folder
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load(folder)[0].state_dict())


def make_positions() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "layer": layer,
                "kv_head": head,
                "start": start,
                "end": start + 8,
                "density": 0.1 * head + start / 100,
            }
            for layer in range(4)
            for head in range(2)
            for start in (0, 8)
        ]
    )


def make_comparison(**columns: list[Any]) -> pd.DataFrame:
    frame = pd.DataFrame(
        {
            "strategy": ["full-attention", "sp-kv", "densest", "last", "spread"],
            "density_percent": [100.0, 42.5, 25.0, 25.0, 25.0],
            "coverage_percent": [100.0, 100.0, 47.1, 35.3, 2.9],
            "nll": [2.0, 2.001, 2.004, 2.006, 2.01],
            "delta_nll_percent": [np.nan, 0.05, 0.2, 0.3, 0.5],
            "delta_nll_standard_error": [np.nan, 0.01, 0.01, 0.01, 0.01],
            "num_global": [np.nan, np.nan, 2, 2, 2],
            "num_seeds": 1,
            "steps": 100,
            "note": [np.nan, "", "", "", ""],
        }
    )
    return frame.assign(**columns)


def make_search(**columns: list[Any]) -> pd.DataFrame:
    """Make the table of a search with two samplers and two retrained layouts, one of them a baseline."""
    nan = np.nan
    frame = pd.DataFrame(
        {
            "name": ["densest", "density-0-0", "density-0-1", "random-0-0", "random-0-1"],
            "sampler": ["baseline", "density", "density", "random", "random"],
            "seed": 0,
            "trial": [0.0, 0.0, 1.0, 0.0, 1.0],
            "hash": ["a", "a", "b", "c", "d"],
            "num_global": 3.0,
            "coverage_percent": [60.0, 60.0, 50.0, 20.0, 30.0],
            "cost": nan,
            "zero_shot_delta_percent": [0.9, 0.9, 0.5, 2.0, 1.5],
            "zero_shot_standard_error": 0.1,
            "short_delta_percent": [0.8, 0.8, 0.6, nan, 1.4],
            "short_standard_error": [0.1, 0.1, 0.1, nan, 0.1],
            "full_delta_percent": [0.7, 0.7, 0.4, nan, 1.1],
            "full_standard_error": [0.1, 0.1, 0.1, nan, 0.1],
            "heads": "GL LG GL LL",
        }
    )
    return frame.assign(**columns)
