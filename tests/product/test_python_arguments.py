"""Test that public functions convert arguments of the wrong kind, or name them in one line with what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import DENSITY, make_table, tiny_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import spkv_nas
from spkv_nas import GateConfig, Layout, UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.config_section import checkpoint_layout

LAYOUT = Layout(("GL", "LL", "LG", "GG"), window=5, strategy="mixed")
TEXTS = [
    f"number {n} of the quick brown foxes jumps over the lazy dog again and again" * 4
    for n in range(24)
]


class TestArguments:
    @pytest.fixture
    def right(
        self, blocks: TokenBlocks, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> dict[str, dict[str, Any]]:
        """Return the required arguments of each public function."""
        model, scores = tiny_model(vocab_size=300), make_table(DENSITY)
        nll = spkv_nas.DocumentNLL(np.ones(2), np.ones(2, dtype=np.int64))
        measured = {"model": model, "blocks": blocks}
        return {
            "attach_gates": {"model": model},
            "detach": {"model": model},
            "set_gate_mode": {"model": model, "mode": "hard"},
            "apply_layout": {"model": model, "layout": LAYOUT},
            "layout_applied": {"model": model, "layout": LAYOUT},
            "load": {"path_or_id": tmp_path},
            "save": {"model": model, "tokenizer": tiny_tokenizer, "folder": tmp_path},
            "export": {"layout": LAYOUT, "checkpoint": tmp_path, "out": tmp_path},
            "build_blocks": {"texts": TEXTS, "tokenizer": tiny_tokenizer},
            "measure_separator": {"model": model, "tokenizer": tiny_tokenizer, "texts": TEXTS},
            "evaluate": measured,
            "score": {**measured, "layouts": LAYOUT},
            "verdict": {**measured, "layouts": LAYOUT},
            "auto": {"model": model, "tokenizer": tiny_tokenizer, "texts": TEXTS},
            "critical_budget": {**measured, "scores": scores, "budgets": "1..8"},
            "paired_difference": {"candidate": nll, "baseline": nll},
            "head_gates": measured,
            "probe": measured,
            "learn_gates": {**measured, "config": GateConfig(target_density=0.5)},
            "propose": {"table": scores},
            "coverage": {"table": scores, "layout": LAYOUT},
            "train_hybrids": {
                **measured,
                "tokenizer": tiny_tokenizer,
                "heldout": blocks,
                "layouts": LAYOUT,
                "folder": tmp_path,
            },
            "plot_layout": {"layout": LAYOUT},
            "plot_head_scores": {"scores": scores},
        }

    def test_the_wrong_kind_of_any_argument_is_named(
        self, right: dict[str, dict[str, Any]]
    ) -> None:
        """Most were bare AttributeErrors and TypeErrors from somewhere inside."""
        functions = {name for name in dir(spkv_nas) if inspect.isfunction(getattr(spkv_nas, name))}
        assert functions == right.keys()
        wrong = {"int": ("12", True, 2.5, float("nan"), [1]), "float": ("0.5", True, float("nan"))}
        wrong |= {"bool": ("yes", 2), "str": (3,)}
        count = 0
        for name, arguments in right.items():
            function = getattr(spkv_nas, name)
            for parameter in inspect.signature(function).parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD or "Any" in str(parameter.annotation):
                    continue
                kinds = str(parameter.annotation).replace(" | None", "")
                for value in (*wrong.get(kinds, ()), object()):
                    with pytest.raises(UserError, match=f"^{parameter.name} must be "):
                        function(**{**arguments, parameter.name: value})
                    count += 1
                if "None" not in str(parameter.annotation):
                    with pytest.raises(
                        UserError, match=f"^{parameter.name} must be .*found (None|NoneType)"
                    ):
                        function(**{**arguments, parameter.name: None})
        assert count > 150

    @pytest.mark.parametrize(
        "eight", [np.int64(8), np.uint8(8), 8.0, np.float32(8), np.array(8), torch.tensor(8)]
    )
    def test_numbers_of_other_libraries(
        self, eight: Any, tmp_path: Path, blocks: TokenBlocks
    ) -> None:
        """NumPy's were applied, and then the model could not be saved, evaluated or get another layout."""
        model = tiny_model(vocab_size=300)
        spkv_nas.apply_layout(model, LAYOUT, window=eight, sinks=eight)
        model.save_pretrained(tmp_path)
        assert checkpoint_layout(model) == Layout(LAYOUT.heads, 8, sinks=8)
        layout = Layout(list(LAYOUT.heads), eight, sinks=eight)  # type: ignore[arg-type]
        assert layout == Layout(LAYOUT.heads, 8, sinks=8)
        layout.write(tmp_path / "layout.yaml")
        assert Layout.read(tmp_path / "layout.yaml").content_hash == layout.content_hash
        if isinstance(eight, np.integer):
            assert GateConfig(window=eight) == GateConfig(window=8)
        scores = spkv_nas.head_gates(model, blocks, window=eight, steps=1, budget=eight)
        expected = spkv_nas.head_gates(model, blocks, window=8, steps=1, budget=8)
        assert scores.values == pytest.approx(expected.values, abs=1e-5)

    @pytest.mark.parametrize("window", ["8", True, None, 8.5, float("nan"), [8], 0, -1])
    def test_layouts_refuse_other_windows(self, window: Any) -> None:
        with pytest.raises(UserError, match=r"^window "):
            Layout(LAYOUT.heads, window)

    @pytest.mark.parametrize("heads", ["GL", None, [1, 2], 5, np.eye(2, dtype=bool), {"GL": 1}])
    def test_layouts_refuse_other_grids(self, heads: Any) -> None:
        with pytest.raises(UserError, match=r"^(heads|the grid 'heads')"):
            Layout(heads, 8)

    def test_numbers_out_of_range_are_named(self, blocks: TokenBlocks) -> None:
        model = tiny_model(vocab_size=300)
        for option, value in (
            ("window", 0),
            ("sinks", -1),
            ("steps", 0),
            ("step_tokens", 0),
            ("seed", -1),
        ):
            with pytest.raises(UserError, match=f"^{option} must be at least"):
                spkv_nas.head_gates(model, blocks, **{option: value})

    def test_layouts_and_scores_as_paths_and_proposals(
        self, tokens: Tensor, tmp_path: Path
    ) -> None:
        scores, model = make_table(DENSITY), tiny_model()
        layouts = spkv_nas.propose(scores, 3)
        with pytest.raises(
            UserError, match=r"^layout must be a Layout; found a dict: .*layouts\['densest'\]"
        ):
            spkv_nas.apply_layout(model, layouts)  # type: ignore[arg-type]
        layouts["densest"].write(tmp_path / "layout.yaml")
        scores.write(tmp_path / "probe")
        spkv_nas.apply_layout(model, f"{tmp_path}/layout.yaml")  # type: ignore[arg-type]
        expected = layouts["densest"]
        assert checkpoint_layout(model) == Layout(expected.heads, expected.window)
        spkv_nas.apply_layout(model, {"one": LAYOUT})  # type: ignore[arg-type]
        assert checkpoint_layout(model) == Layout(LAYOUT.heads, 5)
        again = spkv_nas.propose(tmp_path / "probe", 3)  # type: ignore[arg-type]
        assert {name: layout.heads for name, layout in again.items()} == {
            n: layout.heads for n, layout in layouts.items()
        }
        with pytest.raises(UserError, match="layout not found"):
            spkv_nas.apply_layout(model, "layout.yaml")  # type: ignore[arg-type]

    def test_remedies(self, blocks: TokenBlocks, tmp_path: Path) -> None:
        model = tiny_model(vocab_size=300)
        for call, remedy in (
            (
                lambda: spkv_nas.score(model, TEXTS, LAYOUT),
                r"found a list: .*build_blocks\(texts, tokenizer\)",
            ),  # type: ignore[arg-type]
            (lambda: spkv_nas.evaluate(f"{tmp_path}", blocks), r"spkv_nas.load\(path\)"),  # type: ignore[arg-type]
            (lambda: spkv_nas.propose(DENSITY), r"HeadScores.from_array\(values\)"),  # type: ignore[arg-type]
            (
                lambda: spkv_nas.probe(model, blocks, signal="add-one-head", stepz=3),
                "add-one-head has no option 'stepz'",
            ),
            (
                lambda: spkv_nas.probe(model, blocks, signal="head-gates", steps="3"),
                "^steps must be a whole number",
            ),
            (
                lambda: spkv_nas.probe(model, blocks, signal="head-gates", steps=0),
                "^steps must be at least 1",
            ),
        ):
            with pytest.raises(UserError, match=remedy):
                call()
        evaluation = spkv_nas.evaluate(model, blocks)
        assert spkv_nas.paired_difference(evaluation, evaluation).percent == 0.0  # type: ignore[arg-type]

    def test_errors_name_parameters_instead_of_options(
        self, blocks: TokenBlocks, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        model = tiny_model(vocab_size=300)
        (tmp_path / "file").write_text("")
        calls: list[Callable[[], Any]] = [
            lambda: spkv_nas.head_gates(model, blocks, window=32),
            lambda: spkv_nas.probe(model, blocks, signal="retrieval", window=31),
            lambda: spkv_nas.probe(model, blocks, signal="add-one-head", granularity="x"),
            lambda: spkv_nas.probe(model, blocks, signal="add-one-head", max_heads=1),
            lambda: spkv_nas.probe(model, blocks, signal="regression", num_layouts=1),
            lambda: spkv_nas.probe(model, blocks, 0.4, signal="add-one-head"),
            lambda: spkv_nas.build_blocks(["short"], tiny_tokenizer, block_size=512),
            lambda: spkv_nas.build_blocks(TEXTS, tiny_tokenizer, separator="?!"),
            lambda: spkv_nas.export(LAYOUT, tmp_path, tmp_path),
            lambda: LAYOUT.write(tmp_path / "file" / "layout.yaml"),
            lambda: make_table(DENSITY).write(tmp_path / "file" / "probe"),
        ]
        for call in calls:
            with pytest.raises(UserError) as error:
                call()
            assert "--" not in str(error.value)


class TestBeforeAnyPass:
    """What a function refuses, it refuses before the model runs, and it names the argument."""

    @pytest.fixture
    def model(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        model = tiny_model(vocab_size=300)

        def fail(*_: Any, **__: Any) -> None:
            raise AssertionError("the model ran")

        monkeypatch.setattr(type(model), "forward", fail)
        return model

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            ("corpus/", "is the path 'corpus/': give a list of texts"),
            ("stories.jsonl.gz", "is the path 'stories.jsonl.gz'"),
            (Path("stories.txt"), "is the path 'stories.txt'"),
            (str(Path(__file__)), "is the path "),
            (b"bytes", r"is of type bytes: give a list of strings, such as \[.*decode"),
            (
                pd.DataFrame({"text": TEXTS}),
                r"is a DataFrame: give a list of texts, such as list\(.*COLUMN",
            ),
            ({"text": TEXTS}, "is of type dict: give a list of texts"),
            (3, "must be "),
            ([*TEXTS, 3], "^text 25 is of type int: expected a string"),
            ([{"text": text} for text in TEXTS], "^text 1 is of type dict: expected a string"),
            ([[1, 2], [3]], "^text 1 is of type list: expected a string"),
            ([*TEXTS, b"x"], "^text 25 is of type bytes"),
        ],
    )
    def test_texts(
        self, model: Any, tiny_tokenizer: PreTrainedTokenizerBase, texts: Any, message: str
    ) -> None:
        """A string was read as one document per character, a DataFrame as the names of its columns."""
        calls: dict[str, Callable[[], Any]] = {
            "texts": lambda: spkv_nas.auto(model, tiny_tokenizer, texts),
            "blocks": lambda: spkv_nas.verdict(model, LAYOUT, texts, tokenizer=tiny_tokenizer),
        }
        for name, call in calls.items():
            with pytest.raises(
                UserError, match=message if message.startswith("^") else f"^{name} {message}"
            ):
                call()
        if not message.startswith("^"):
            with pytest.raises(UserError, match=f"^texts {message}"):
                spkv_nas.build_blocks(texts, tiny_tokenizer)

    def test_one_string_is_one_text(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        text = "\n\n".join(TEXTS)
        one, several = (spkv_nas.build_blocks(each, tiny_tokenizer, 32) for each in (text, [text]))
        assert np.array_equal(one.tokens, several.tokens)

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("margin", "nll=0%"),
            ("margin", "nothing=1%"),
            ("margin", "nll"),
            ("risk", 0.0),
            ("risk", "80%"),
            ("risk", "often"),
            ("memory", "much"),
            ("memory", "40%..10%"),
            ("memory", "200%"),
            ("max_tokens", 0),
        ],
    )
    def test_options(
        self,
        model: Any,
        tiny_tokenizer: PreTrainedTokenizerBase,
        blocks: TokenBlocks,
        option: str,
        value: Any,
    ) -> None:
        options = {option: value}
        calls: list[Callable[[], Any]] = [
            lambda: spkv_nas.auto(model, tiny_tokenizer, TEXTS, **options)
        ]
        if option != "memory":
            calls.append(
                lambda: spkv_nas.verdict(model, LAYOUT, TEXTS, tokenizer=tiny_tokenizer, **options)
            )
            scores = make_table(DENSITY)
            calls.append(lambda: spkv_nas.critical_budget(model, scores, blocks, "1..8", **options))
        for call in calls:
            with pytest.raises(UserError, match=f"^{option} |^--{option} |{option}"):
                call()

    def test_probe_and_learning(self, model: Any, blocks: TokenBlocks) -> None:
        for options in ({"memory": "much"}, {"memory": 0}):
            with pytest.raises(UserError, match=f"^{next(iter(options))} "):
                spkv_nas.probe(model, blocks, signal="head-gates", **options)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"^learning_rate must be above 0; found -1"):
            spkv_nas.learn_gates(model, blocks, GateConfig(target_density=0.5), learning_rate=-1.0)

    @pytest.mark.parametrize(
        "options",
        [
            {"page_size": 0},
            {"page_size": 4.5},
            {"page_size": "4"},
            {"page_size": None},
            {"max_pages": -1},
            {"max_pages": 0},
            {"max_pages": 2.5},
            {"page_size": True},
        ],
    )
    def test_sizes_of_the_cache(self, options: dict[str, Any]) -> None:
        """They were taken, and the first pass ended in another exception."""
        model = tiny_model(vocab_size=300)
        spkv_nas.apply_layout(model, LAYOUT)
        with pytest.raises(UserError, match=f"^{next(iter(options))} must be "):
            spkv_nas.SPKVCache(model, **options)
        spkv_nas.SPKVCache(model, page_size=np.int64(4), max_pages=9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path", ["/nonexistent", "path/to/model", "./models/typo", "~/model", "models/typo"]
)
def test_a_missing_folder_is_called_so(path: str) -> None:
    with pytest.raises(UserError, match=r"folder does not exist|there is no such folder"):
        spkv_nas.load(path)


def test_a_folder_of_the_home_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    spkv_nas.save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "model")
    spkv_nas.load("~/model")
    with pytest.raises(UserError, match="this is a file and no folder"):
        spkv_nas.load("~/model/config.json")
