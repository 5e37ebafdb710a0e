"""Test blocks of separate documents: each is measured and trained as if it were alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import sharpen_attention, tiny_model
from marks import slow
from model.test_cache_families import FAMILIES as CACHE_FAMILIES
from transformers import PreTrainedModel, PreTrainedTokenizerBase, default_data_collator

import spkv_nas
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.contrib.signals.measure.attention_mass import attention_mass
from spkv_nas.contrib.signals.measure.retrieval import needles, retrieval
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks, build_blocks
from spkv_nas.data.splits import load_text
from spkv_nas.data.tokenizer import train_bpe
from spkv_nas.evaluation.continuations import predict, write_continuations
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.model import loss, modes, windows
from spkv_nas.model.attention import watch_logits
from spkv_nas.model.density_tracker import DensityTracker
from spkv_nas.model.gates import predictors
from spkv_nas.model.generation import continue_tokens
from spkv_nas.probing.duo import duo
from spkv_nas.probing.head_gates import head_gates
from spkv_nas.probing.sinks import measure_sinks
from spkv_nas.probing.window_costs import window_costs
from spkv_nas.training.corpus import BlockDataset

SIZE, WINDOW = 32, 4
WORDS = ["alpha", "beta", "gamma", "delta"]
# Of 5 to 30 tokens
TEXTS = [" ".join(np.resize(WORDS, 1 + i * 7 % 12)) + f" {i}" for i in range(24)]
IN_TEXT = "Ġgamma"  # token that most texts contain, here also after each of them
LAYOUT = Layout(("GL", "LG", "LL", "GL"), WINDOW, sinks=1)
SEPARATE: dict[str, Any] = {"documents": "separate"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_bpe(TEXTS, 300, bos=True)


@pytest.fixture
def model() -> PreTrainedModel:
    return sharpen_attention(tiny_model(vocab_size=300), 4.0)


@pytest.fixture(
    params=[
        *map(slow, ["bos", "eos"]),
        "eos+bos",
        "eos without bos",
        slow(IN_TEXT),
        f"{IN_TEXT} without bos",
    ]
)
def blocks(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase) -> TokenBlocks:
    separator, _, plain = request.param.partition(" ")
    return build_blocks(
        TEXTS, tokenizer, SIZE, separator=separator, bos=False if plain else "auto", **SEPARATE
    )


def inputs(blocks: TokenBlocks) -> dict[str, torch.Tensor]:
    return blocks.boundaries.inputs(torch.from_numpy(blocks.marked().astype(np.int64)))


def parts(blocks: TokenBlocks) -> list[np.ndarray]:
    """Return the documents in the blocks, with opening tokens and separators, and without filling."""
    starts = [np.flatnonzero(row == 0)[1:] for row in inputs(blocks)["position_ids"].numpy()]
    documents = [
        part
        for row, start in zip(blocks.tokens, starts, strict=True)
        for part in np.split(row, start)
    ]
    return [part for part in documents if len(set(part.tolist())) > 2]


def alone(model: PreTrainedModel, blocks: TokenBlocks) -> tuple[float, int]:
    """Return the NLL of all documents, each in a pass of its own, and the number of their targets."""
    opening, total, count = blocks.opening, 0.0, 0
    for part in parts(blocks):
        losses = loss.token_nll(model, torch.from_numpy(part.astype(np.int64))[None])[0]
        scored = ~np.isin(part[1:], opening)
        total, count = total + float(losses[scored].sum()), count + int(scored.sum())
    return total, count


def without_special(blocks: TokenBlocks, part: np.ndarray) -> list[int]:
    """Return the text of a document in the blocks, without opening tokens and what ends it."""
    num_opening = len(blocks.opening)
    ending = blocks.boundaries.separator[: len(blocks.boundaries.separator) - num_opening]
    text = part.tolist()[num_opening:]
    return text[: -len(ending)] if ending and text[-len(ending) :] == [*ending] else text


def test_documents_are_whole(tokenizer: PreTrainedTokenizerBase, blocks: TokenBlocks) -> None:
    found = [without_special(blocks, part) for part in parts(blocks)]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert len(found) > 20  # without those of a last block that is not half full
    assert all(tokens in expected for tokens in found)
    shuffled = [part.tolist() for part in parts(blocks.in_random_order(0))]
    assert sorted(shuffled)[:-1] != shuffled[:-1]
    assert {*map(tuple, shuffled)} <= {tuple(part.tolist()) for part in parts(blocks)}
    assert all(tuple(part[: len(blocks.opening)]) == blocks.opening for part in parts(blocks))


@torch.inference_mode()
def test_nll_is_that_of_documents_alone(model: PreTrainedModel, blocks: TokenBlocks) -> None:
    """The first tokens of documents are no targets."""
    full, local = zero_shot(model, [None, LAYOUT], blocks)
    for nll in (full, document_nll(model, blocks)):
        assert (nll.total.sum(), nll.num_tokens.sum()) == pytest.approx(
            alone(model, blocks), rel=1e-5
        )
    with spkv_nas.layout_applied(model, LAYOUT):
        assert (local.total.sum(), local.num_tokens.sum()) == pytest.approx(
            alone(model, blocks), rel=1e-5
        )
    joined = zero_shot(
        model, [None], TokenBlocks(blocks.tokens, blocks.document, blocks.documents)
    )[0]
    assert abs(joined.mean - full.mean) > 1e-3


@torch.inference_mode()
def test_training_counts_the_same_targets(model: PreTrainedModel, blocks: TokenBlocks) -> None:
    batch = default_data_collator([*BlockDataset(blocks)])
    total, count = alone(model, blocks)
    assert int((batch["labels"][:, 1:] != loss.NO_TARGET).sum()) == count
    assert model(**batch, use_cache=False).loss.item() == pytest.approx(total / count, rel=1e-5)


def test_gates_learn_on_the_same_targets(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    blocks = build_blocks(TEXTS, tokenizer, SIZE, **SEPARATE)
    with torch.inference_mode():
        total, count = alone(model, blocks)
        assert loss.mean_nll(model, **inputs(blocks)).item() == pytest.approx(
            total / count, rel=1e-5
        )
    spkv_nas.learn_gates(model, blocks, spkv_nas.GateConfig(window=WINDOW, price=0.1), steps=1)
    assert spkv_nas.probe(model, blocks).values.shape == (4, 2)


def test_signals_see_documents(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Windows as long as the longest document cost nothing."""
    texts = [" ".join(text.split()[-3:]) for text in TEXTS]
    separate, joined = (
        build_blocks(texts, tokenizer, SIZE, documents=each) for each in ("separate", "joined")
    )
    longest = max(map(len, parts(separate)))
    for blocks, is_free in ((separate, True), (joined, False)):
        gates = head_gates(model, blocks, longest, sinks=0, steps=2)
        alphas = duo(model, blocks, longest, sinks=0, steps=2)
        costs = window_costs(model, blocks, longest, windows=())
        assert (gates.record.entries()["divergence"] < 1e-6) is is_free
        assert (alphas.record.entries()["distillation_loss"] < 1e-6) is is_free
        assert (float(np.abs(costs.values).max()) < 1e-6) is is_free


def document_batches(blocks: TokenBlocks) -> list[torch.Tensor]:
    """Return each document as a batch [1, tokens] of its own."""
    return [torch.from_numpy(part.astype(np.int64))[None] for part in parts(blocks)]


def test_filling_does_not_count(model: PreTrainedModel, blocks: TokenBlocks) -> None:
    """Divergence, price and densities are means over the tokens of documents, as if each were alone."""
    batches, batch = document_batches(blocks), inputs(blocks)
    num_tokens = sum(x.numel() for x in batches)
    assert (
        int(blocks.boundaries.is_filling(blocks.marked())[:, 1:].sum())
        == blocks.tokens.size - num_tokens
        > 0
    )
    assert blocks.boundaries.num_measured(blocks.marked()) == (
        num_tokens - len(batches),
        num_tokens,
    )
    # Divergence of a layout
    with spkv_nas.layout_applied(model, LAYOUT), torch.no_grad():
        reference = partial(windows.full_attention, model)
        sums = [loss.mean_divergence(model, x, reference) * (x.numel() - 1) for x in batches]
        divergence = loss.mean_divergence(
            model, batch["input_ids"], reference, position_ids=batch["position_ids"]
        )
    # Log-probabilities in float32 are right to 1e-7 or so, which a small divergence of them cannot be better than
    assert divergence.item() == pytest.approx(
        sum(sums).item() / (num_tokens - len(batches)), rel=1e-4, abs=3e-8
    )
    # Price and densities of gates, without effect on hidden states in any mode; the sink token has no gate
    spkv_nas.attach_gates(
        model, spkv_nas.GateConfig(window=SIZE, sinks=1, bias=0.0, init_scale=40.0), seed=0
    )
    *_, predictor = predictors(
        model
    ).values()  # of the last layer, which no other layer's price moves
    kept, slope = 0.0, 0.0
    with watch_logits(model, lambda layer, logits, _: seen.append(logits)):
        for tokens in batches:
            seen: list[torch.Tensor] = []
            model(input_ids=tokens, use_cache=False)
            kept = kept + torch.stack([(logits >= 0).sum((0, 2)) for logits in seen])
            (gradient,) = torch.autograd.grad(torch.sigmoid(seen[-1]).sum(), predictor.down.weight)
            slope = slope + gradient
    padded = torch.nn.utils.rnn.pad_sequence([x[0] for x in batches], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(x[0]) for x in batches], batch_first=True
    )
    for each in (batch, {"input_ids": padded, "attention_mask": mask}):
        tracker, slopes = DensityTracker(model), []
        tracker.start()
        for price in (0.0, 1000.0):
            modes.set_price(model, price)
            nll = model(**each, use_cache=False).logits.square().mean()
            slopes.append(torch.autograd.grad(nll, predictor.down.weight)[0])
        assert tracker.stop() == pytest.approx((kept / num_tokens).numpy())
        expected = 1000.0 / 4 * slope / (2 * num_tokens)  # 4 layers of 2 heads
        assert torch.allclose(
            slopes[1] - slopes[0], expected, rtol=1e-2, atol=1e-4 * float(expected.abs().max())
        )
    modes.set_price(model, 0.0)
    table = spkv_nas.probe(model, blocks)
    assert table.density == pytest.approx((kept / num_tokens).numpy(), abs=1e-4)
    assert table.rows["num_tokens"].unique().tolist() == [num_tokens]
    assert table.positions.groupby(["layer", "kv_head"])["num_tokens"].sum().unique().tolist() == [
        num_tokens
    ]


@pytest.mark.filterwarnings("ignore:the model predicts only")
def test_attention_is_that_of_documents_alone(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Mass outside of the window and on first tokens, and retrieval inside of the longest document."""
    blocks = build_blocks(TEXTS, tokenizer, SIZE, **SEPARATE)
    infos = (DocumentInfo("a", "all", "a"),)
    alone = [TokenBlocks(part[None], np.zeros_like(part[None]), infos) for part in parts(blocks)]
    # Average over the queries that count in each document
    beyond = [each for each in alone if each.block_size > WINDOW]
    masses = [attention_mass(model, each, WINDOW, sinks=1).values for each in beyond]
    expected = np.average(masses, 0, [each.block_size - WINDOW for each in beyond])
    assert attention_mass(model, blocks, WINDOW, sinks=1).values == pytest.approx(
        expected, rel=1e-4
    )
    beyond = [each for each in alone if each.block_size > WINDOW + 8]
    reports = [measure_sinks(model, each, WINDOW) for each in beyond]
    weights = [each.block_size - WINDOW - 8 for each in beyond]
    found = measure_sinks(model, blocks, WINDOW)
    assert found.mass == pytest.approx(
        np.average([each.mass for each in reports], 0, weights), rel=1e-4
    )
    assert found.average == pytest.approx(
        np.average([each.average for each in reports], 0, weights)
    )
    # Move all documents but the longest of each block, which retrieval reads last
    rows = []
    for row in blocks.tokens:
        documents = np.split(row, np.flatnonzero(blocks.boundaries.begins_text(row)))
        longest = documents.pop(int(np.argmax([len(part) for part in documents])))
        rows.append(np.concatenate([longest, *reversed(documents)]))
    moved = replace(
        blocks, tokens=np.stack(rows), document=np.zeros_like(blocks.document), begins=None
    )
    original = replace(blocks, document=moved.document)
    assert retrieval(model, moved, 2, needle_length=3).values == pytest.approx(
        retrieval(model, original, 2, needle_length=3).values, rel=1e-4
    )
    with pytest.raises(UserError, match="cannot hold a needle of 12"):
        retrieval(model, blocks, 2, needle_length=12)


def test_continuations_are_those_of_documents_alone(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, blocks: TokenBlocks
) -> None:
    lines = write_continuations(model, tokenizer, blocks, 8)
    predicted = predict(model, blocks, lines, 8, temperature=1.0)
    positions = blocks.boundaries.positions(blocks.marked()[:, :-8])[:, -1]
    assert (positions < SIZE - 9).any(), "some prompts have several documents"
    for line, scores, position in zip(lines, predicted, positions, strict=True):
        prompt = torch.tensor(blocks.tokens[line["block"], -9 - position : -8].astype(np.int64))[
            None
        ]
        assert (
            continue_tokens(model, tokenizer, prompt, torch.ones_like(prompt), 8)[0]
            == line["tokens"]
        )
        tokens = torch.cat([prompt[0], torch.tensor(line["tokens"])])
        with torch.inference_mode():
            log_p = model(tokens[None]).logits[0, position:-1].log_softmax(-1)
        expected = log_p.gather(-1, tokens[position + 1 :, None])[:, 0]
        assert scores["predicted"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_needles_are_in_the_longest_document(blocks: TokenBlocks) -> None:
    before = blocks.boundaries.positions(blocks.marked())
    moved = needles(blocks, 2, 3, seed=0).blocks
    positions = moved.boundaries.positions(moved.marked())
    assert moved.num_blocks >= blocks.num_blocks - 1
    assert np.isin(positions[:, -1], before.max(1)).all()
    assert (positions.max(1) == positions[:, -1]).all()


def test_are_the_same_from_files(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / f"text/{number:02}.txt").write_text(text)
    build: Any = {"block_size": SIZE, "separator": "eos"}
    for documents in ("separate", "joined"):
        expected = build_blocks(TEXTS, tokenizer, documents=documents, **build)
        for _ in range(2):  # from the text, and from the cache
            found = load_text(
                [str(tmp_path / "text")],
                tokenizer,
                tmp_path / "cache",
                Path(),
                documents=documents,
                **build,
            )
            assert np.array_equal(found.tokens, expected.tokens)
            assert found.boundaries == expected.boundaries


def test_no_token_is_needed_between_documents(tokenizer: PreTrainedTokenizerBase) -> None:
    """A model that knows no separator reads each document alone as well."""
    texts = TEXTS[:6]
    blocks = build_blocks(texts, tokenizer, SIZE, separator="none", bos=False, **SEPARATE)
    positions = blocks.boundaries.positions(blocks.marked())
    for row, owner in enumerate(blocks.document):
        is_text = ~blocks.boundaries.is_filling(blocks.marked(row))
        firsts = [
            np.flatnonzero(is_text & (owner == index))[0] for index in np.unique(owner[is_text])
        ]
        assert [positions[row, first] for first in firsts] == [0] * len(firsts)
    assert int((~blocks.boundaries.is_filling(blocks.marked())).sum()) > 0


def test_refusals(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match="unknown documents 'apart'"):
        build_blocks(TEXTS, tokenizer, SIZE, documents="apart")
    blocks = build_blocks(TEXTS, tokenizer, SIZE, **SEPARATE)
    for family in ("lfm2", "falcon_h1"):  # states of some layers, and in all beside attention
        with pytest.raises(UserError, match="cannot keep documents of a block separate"):
            document_nll(tiny_model(family, **CACHE_FAMILIES[family], vocab_size=300), blocks)
