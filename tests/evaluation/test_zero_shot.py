"""Test zero-shot scores against layouts applied one by one, with shared layers and with scores from disk."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from helpers import BLOCK, MessageLog, equal_up_to_rounding, fails, gated, tiny_model
from marks import slow_after
from scipy.stats import spearmanr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.displacement import COLUMNS
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.manifest import MANIFEST
from spkv_nas.cli import main
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks, build_blocks
from spkv_nas.data.config import SEPARATE
from spkv_nas.data.sources import documents
from spkv_nas.evaluation.nll import document_nll
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.evaluation.ranking import NUM_RESAMPLES, format_rank_correlation, rank_correlation
from spkv_nas.evaluation.zero_shot import cache_folder, cache_shares, score_table, zero_shot
from spkv_nas.model.attach import detach
from spkv_nas.model.attention import attention_layers, layer_states
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.windows import apply_layout, full_attention

GRIDS = ("GL LL LG LL", "GL LL LG GG", "LL LL LL LL", "GL LL LG LL", "GL GG LG LL", "GL LL LL LL")
LAYOUTS = [Layout(tuple(grid.split()), window) for window in (6, 3) for grid in GRIDS]


def test_a_stored_score_serves_the_same_blocks_of_more_documents(
    blocks: TokenBlocks, tmp_path: Path
) -> None:
    """A search takes the first blocks of a longer text."""
    model = tiny_model()
    more = replace(blocks, documents=(*blocks.documents, DocumentInfo("12", "all", "12")))
    layouts = LAYOUTS[:2]
    for some in (blocks, more, blocks):
        cache = cache_folder(tmp_path, model, "embedded:dense", some)
        for score, alone in zip(
            zero_shot(model, layouts, some, cache=cache),
            zero_shot(model, layouts, some),
            strict=True,
        ):
            assert same(score, alone)
    assert len(list(tmp_path.iterdir())) == 1


def same(one: DocumentNLL, other: DocumentNLL) -> bool:
    """Return whether one is a copy of the other, such as what was written to a file."""
    return np.array_equal(one.total, other.total) and np.array_equal(
        one.num_tokens, other.num_tokens
    )


def agree(one: DocumentNLL, other: DocumentNLL) -> bool:
    """Return whether two computations have one result."""
    return equal_up_to_rounding(one.total, other.total) and np.array_equal(
        one.num_tokens, other.num_tokens
    )


def by_hand(model: PreTrainedModel, layout: Layout | None, text: TokenBlocks) -> DocumentNLL:
    """Return NLL with the layout applied to a copy of the model without gates."""
    model = copy.deepcopy(model)
    detach(model)
    if layout is not None:
        apply_layout(model, layout)
    return document_nll(model, text, batch_size=4)


class TestScores:
    @pytest.mark.parametrize("family", slow_after(3, ["gemma3_text", "sp-kv", "hybrid", "granite"]))
    def test_scores_equal_each_layout_applied_alone(self, family: str, blocks: TokenBlocks) -> None:
        """In any order, with repetitions, on dense, local, gated and hybrid models."""
        model = (
            gated()
            if family == "sp-kv"
            else tiny_model("llama" if family == "hybrid" else family, vocab_size=300)
        )
        if family == "hybrid":
            apply_layout(model, LAYOUTS[1])
        before = document_nll(model, blocks)
        scores = zero_shot(model, [None, *LAYOUTS, None], blocks, batch_size=4)
        for layout, score in zip(LAYOUTS, scores[1:-1], strict=True):
            assert agree(score, by_hand(model, layout, blocks))
        assert agree(scores[0], scores[-1])
        # PyTorch's own attention
        assert scores[0].total == pytest.approx(by_hand(model, None, blocks).total, rel=1e-6)
        # Of 14, a layout of each window and None come twice; every other layer of Gemma 3 keeps its native window
        assert len({score.mean for score in scores}) == (7 if family == "gemma3_text" else 11)
        assert agree(document_nll(model, blocks), before)

    def test_the_model_is_restored(self, blocks: TokenBlocks) -> None:
        model = gated().train()
        states = copy.deepcopy(layer_states(model))
        with pytest.raises(
            UserError, match=r"the layout is for 3 layers x 2 KV heads, the model has 4 layers x 2"
        ):
            zero_shot(model, [LAYOUTS[0], Layout(("GL",) * 3, 6)], blocks)
        zero_shot(model, LAYOUTS[:2], blocks)
        assert model.training
        assert layer_states(model) == states
        assert not any("forward" in vars(module) for module in model.modules())
        dense = tiny_model()
        zero_shot(dense, LAYOUTS[:2], blocks)
        assert not attention_layers(dense)
        assert dense.config._attn_implementation == "sdpa"

    def test_shared_prefixes_run_once(self, blocks: TokenBlocks) -> None:
        """Each batch runs one layer per node of the layouts' tree of prefixes."""
        model = tiny_model(vocab_size=300)
        runs = [0] * 4
        for depth, layer in enumerate(model.model.layers):
            layer.mlp.register_forward_hook(
                lambda *_, depth=depth: runs.__setitem__(depth, runs[depth] + 1)
            )
        zero_shot(model, LAYOUTS[:1], blocks, batch_size=4)
        alone = runs.copy()
        zero_shot(model, LAYOUTS[:6], blocks, batch_size=4)
        extra = [both - 2 * one for both, one in zip(runs, alone, strict=True)]
        nodes = [len({tuple(grid.split()[: depth + 1]) for grid in GRIDS}) for depth in range(4)]
        assert nodes == [2, 3, 4, 5]
        assert extra == [3 * (count - 1) for count in nodes]  # three batches

    def test_layers_that_share_more_than_hidden_states_run_whole(self, blocks: TokenBlocks) -> None:
        model = tiny_model(vocab_size=300)
        seen: list[torch.Tensor] = []
        first, *_, last = model.model.layers
        first.mlp.register_forward_hook(lambda _m, _a, out: seen.append(out))
        last.register_forward_hook(lambda _m, _a, out: out + seen.pop())
        expected = []
        for layout in LAYOUTS[:3]:
            apply_layout(model, layout)
            expected.append(document_nll(model, blocks, batch_size=4))
        detach(model)
        scores = zero_shot(model, LAYOUTS[:3], blocks, batch_size=4)
        assert all(agree(*pair) for pair in zip(scores, expected, strict=True))

    def test_progress_counts_what_is_run(self, blocks: TokenBlocks) -> None:
        messages = MessageLog()
        zero_shot(
            tiny_model(vocab_size=300),
            LAYOUTS[:2],
            blocks,
            batch_size=6,
            reporter=messages.reporter,
        )
        assert messages.bars == {"zero-shot scoring": [(6, 18), (12, 18), (15, 18), (18, 18)]}


def test_full_attention_lifts_gates_and_windows(blocks: TokenBlocks) -> None:
    expected = document_nll(tiny_model("gemma3_text", vocab_size=300), blocks)
    model = gated("gemma3_text")
    with full_attention(model):
        assert document_nll(model, blocks).total == pytest.approx(expected.total, rel=1e-6)
    assert document_nll(model, blocks).total != pytest.approx(expected.total, rel=1e-3)


class TestCache:
    def test_a_finished_score_is_not_computed_again(
        self,
        blocks: TokenBlocks,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        model = tiny_model(vocab_size=300)
        first = zero_shot(model, [None, *LAYOUTS[:3]], blocks, cache=tmp_path)
        assert {p.stem for p in tmp_path.iterdir()} == {
            "full-attention",
            *(x.content_hash for x in LAYOUTS[:3]),
        }
        with monkeypatch.context() as patch:
            patch.setattr(
                "spkv_nas.evaluation.zero_shot.score_windows",
                lambda *_, **__: pytest.fail("computed again"),
            )
            messages = MessageLog()
            layouts = [LAYOUTS[2], None, LAYOUTS[0]]
            again = zero_shot(model, layouts, blocks, cache=tmp_path, reporter=messages.reporter)
        assert messages.announced == ["reused 3 of 3 zero-shot scores"]
        assert all(same(*pair) for pair in zip(again, (first[3], first[0], first[1]), strict=True))
        (tmp_path / f"{LAYOUTS[1].content_hash}.npz").write_bytes(b"PK torn")
        mended = zero_shot(model, LAYOUTS[1:2], blocks, cache=tmp_path)
        assert agree(mended[0], first[2])
        assert same(DocumentNLL.read(tmp_path / f"{LAYOUTS[1].content_hash}.npz"), mended[0])

    def test_a_damaged_score_is_computed_again(self, blocks: TokenBlocks, tmp_path: Path) -> None:
        """Also where the damage is in compressed numbers."""
        model = tiny_model(vocab_size=300)
        whole = zero_shot(model, LAYOUTS[:1], blocks, cache=tmp_path)[0]
        file = tmp_path / f"{LAYOUTS[0].content_hash}.npz"
        content = file.read_bytes()
        for position in range(len(content)):
            file.write_bytes(
                content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]
            )
            with contextlib.suppress(UserError):
                assert same(DocumentNLL.read(file), whole)
        file.write_bytes(content[:59] + b"\xff" + content[60:])
        with pytest.raises(UserError, match=r"npz is damaged: .*\nremove its folder"):
            DocumentNLL.read(file)
        assert agree(zero_shot(model, LAYOUTS[:1], blocks, cache=tmp_path)[0], whole)

    def test_its_folder_names_checkpoint_dtype_and_text(
        self,
        blocks: TokenBlocks,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        model = tiny_model(vocab_size=300)
        save(model, tiny_tokenizer, tmp_path / "one")
        model.lm_head.weight.data[0, 0] += 1.0
        for name in ("two", "plain"):
            save(model, tiny_tokenizer, tmp_path / name)
        (tmp_path / "plain" / MANIFEST).unlink()
        moved = TokenBlocks(blocks.tokens, blocks.document[::-1].copy(), blocks.documents)

        def folder(name: str, some: TokenBlocks = blocks, **options: Any) -> Path:
            return cache_folder(
                tmp_path, load(tmp_path / name, **options)[0], tmp_path / name, some
            )

        folders = [
            folder("one"),
            folder("two"),
            folder("one", blocks.take(8)),
            folder("one", moved),
        ]
        folders += [folder("one", dtype=torch.bfloat16)]
        assert len(set(folders)) == 5
        assert folder("plain") == folder("two")  # the same config and weights
        assert folder("one") == folders[0]
        config = tmp_path / "plain" / "config.json"
        config.write_text(
            config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
        )
        assert folder("plain") != folders[1]


class TestRankCorrelation:
    def test_rho_and_its_interval(self) -> None:
        one, other = [3.0, 1.0, 2.0, 5.0, 4.0, np.nan], [0.2, 0.1, 0.4, 0.5, 0.4, 0.3]
        result = rank_correlation(one, other)
        assert result is not None
        rho = spearmanr(one[:5], other[:5]).statistic
        orders = [abs(spearmanr(one[:5], order).statistic) for order in permutations(other[:5])]
        assert result["rho"] == pytest.approx(rho, abs=1e-4)
        assert result["p_value"] == pytest.approx(
            np.mean([some > abs(rho) - 1e-9 for some in orders]), abs=1e-4
        )
        assert result["layouts"] == 5
        many = np.random.default_rng(1).normal(size=(2, 9))
        result = rank_correlation(*many)
        assert result is not None
        assert result["p_value"] == pytest.approx(spearmanr(*many).pvalue, abs=1e-4)
        resamples = np.random.default_rng(0).integers(9, size=(NUM_RESAMPLES, 9))[:400]
        rhos = [spearmanr(*many[:, drawn]).statistic for drawn in resamples]
        assert result["interval"] == pytest.approx(np.percentile(rhos, [2.5, 97.5]), abs=0.15)

    @pytest.mark.parametrize("number", [3, 5, 7, 12])
    def test_no_interval_of_few_layouts_or_a_perfect_order(self, number: int) -> None:
        """Three or five layouts in perfect order would give an interval of +1.00 to +1.00."""
        result = rank_correlation(np.arange(number), -np.arange(number))
        assert result is not None
        assert result["rho"] == -1.0
        assert result["interval"] is None
        p_value = 2 / math.factorial(number) if number < 8 else 0.0
        assert result["p_value"] == pytest.approx(p_value, abs=1e-4)
        exact = "exact " if number < 8 else ""
        shown = f"{exact}p = {result['p_value']:.2g}" if number < 8 else "p < 0.0001"
        assert format_rank_correlation(result) == f"-1.00 ({number} layouts, {shown})"

    @pytest.mark.parametrize(
        "pair", [([1, 2], [1, 2]), ([1, 2, np.nan], [1, 2, 3]), ([1, 1, 1], [1, 2, 3]), ([], [])]
    )
    def test_is_none_where_undefined(self, pair: tuple[list[float], list[float]]) -> None:
        assert rank_correlation(*pair) is None


def test_table(blocks: TokenBlocks) -> None:
    layouts = dict(zip("abc", LAYOUTS, strict=False))
    full, *some = zero_shot(tiny_model(vocab_size=300), [None, *layouts.values()], blocks)
    scores = dict(zip(layouts, some, strict=True))
    memory = cache_shares(tiny_model(), layouts, 24)
    covered = {"a": 0.5, "b": 0.75, "c": 0.0}
    rows = score_table(layouts, scores, full, memory, covered).set_index("strategy")
    assert rows["nll"].tolist() == [full.mean, *sorted(score.mean for score in some)]
    change = paired_difference(scores["b"], full)
    expected = [
        LAYOUTS[1].hash,
        4,
        50.0,
        62.5,
        75.0,
        scores["b"].mean,
        change.percent,
        change.standard_error,
    ]
    measured = rows.drop(columns=list(COLUMNS))
    assert measured.loc["b"].tolist() == [*expected, "GL LL LG GG"]
    assert rows[list(COLUMNS)].isna().all(axis=None)  # nothing was compared
    assert rows.loc["full-attention", ["num_global", "coverage_percent"]].tolist() == [8, 100.0]
    assert score_table(layouts, scores, full, memory, {})["coverage_percent"].isna().all()


class TestCommand:
    @pytest.fixture
    def options(
        self, tmp_path: Path, text: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> list[str]:
        save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "mine")
        for name, layout in zip(("one", "two"), LAYOUTS, strict=False):
            Layout(layout.heads, layout.window, name).write(
                tmp_path / "w" / "layouts" / "mine" / f"{name}.yaml"
            )
        model = ["--model", str(tmp_path / "mine"), "--data", str(text), "--context", str(BLOCK)]
        return [*model, "--workspace", str(tmp_path / "w")]

    def test_scores_of_a_folder(
        self,
        options: list[str],
        tmp_path: Path,
        text: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        main(["score", *options])
        folder = tmp_path / "w" / "reports" / "mine"
        rows = pd.read_csv(folder / "zero-shot.csv", index_col="strategy")
        model, tokenizer = load(tmp_path / "mine")
        expected = by_hand(
            model,
            LAYOUTS[1],
            build_blocks(documents([str(text)], Path()), tokenizer, BLOCK, documents=SEPARATE),
        )
        assert rows.loc["two", "nll"] == pytest.approx(expected.mean, rel=1e-5)
        assert f"{expected.mean:.4f}" in capsys.readouterr().out
        summary = yaml.safe_load((folder / "zero-shot.yaml").read_text())
        assert summary["num_tokens"] == expected.num_tokens.sum()
        assert len(list((tmp_path / "w" / "runs" / "mine" / "zero-shot").glob("*/*.npz"))) == 3 + 2

    def test_with_coverage_of_files(self, options: list[str], tmp_path: Path) -> None:
        table = tmp_path / "table.csv"
        table.write_text(
            "layer,kv_head,density\n"
            + "".join(f"{i},{j},{0.1 * (i + j)}\n" for i in range(4) for j in (0, 1))
        )
        file = tmp_path / "w" / "layouts" / "mine" / "one.yaml"
        main(["score", str(file), *options, "--probe", str(table), "--max-tokens", "70"])
        rows = pd.read_csv(
            tmp_path / "w" / "reports" / "table" / "zero-shot.csv", index_col="strategy"
        )
        assert rows["coverage_percent"].tolist() == pytest.approx([100.0, 100 * 0.3 / 1.6])
        assert (
            yaml.safe_load((tmp_path / "w" / "reports" / "table" / "zero-shot.yaml").read_text())[
                "num_tokens"
            ]
            == 62
        )

    def test_bad_input(
        self, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wrong = tmp_path / "wrong.yaml"
        Layout(("GLG",) * 4, window=6).write(wrong)
        assert "the model has 4 layers x 2 KV heads" in fails(capsys, "score", wrong, *options)
        assert "--model needs --data" in fails(capsys, "score", "--model", "somewhere")
        assert "no layouts in" in fails(capsys, "score", "--workspace", tmp_path / "empty")
        assert "layout not found" in fails(capsys, "score", tmp_path / "none.yaml", *options)
        assert "no probe 'x'" in fails(capsys, "score", *options, "--probe", "x")
        assert "less than one block" in fails(capsys, "score", *options, "--max-tokens", "9")
        assert not list((tmp_path / "w").rglob("*.csv"))
