"""Test that engines are compared with the model: a folder with a wrong layer fails, and the check says which."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_cases import HEADS, LAYERS, WINDOW, WINDOWS, sharp_model, swap
from helpers import save_with_tokenizer, tiny_model
from transformers import PreTrainedTokenizerBase
from vllm_server import PYTHON, needs_vllm

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.engines.cache import CacheSettings, LayerCache, ModelCache
from spkv_nas.engines.vllm import VLLM, count_parts
from spkv_nas.model.checkpoint import save
from spkv_nas.model.export.export import export
from spkv_nas.model.windows import add_learned_sinks, apply_layout
from spkv_nas.serving import engine_check
from spkv_nas.serving.engine_check import EngineCheck, compare_with_engine, native_layout

# Local heads of a layer have one window
BY_LAYER = replace(WINDOWS, heads=("GL", "MM", "NG", "GM"))
WRONG = ("GL", "LL", "LL", "GG")  # another third layer than HEADS
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "olmo2", "phi3", "granite")
MLX = os.environ.get("SPKV_MLX_PYTHON")
needs_mlx = pytest.mark.skipif(
    MLX is None, reason="SPKV_MLX_PYTHON names no Python with mlx-lm (docs/guides/vllm.md)"
)


@pytest.fixture(scope="module")
def dense(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> Path:
    """A dense checkpoint."""
    folder = tmp_path_factory.mktemp("check") / "dense"
    save(sharp_model(), tiny_tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def mistral(dense: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    """A dense checkpoint in which every layer has a window."""
    folder = dense.with_name("mistral")
    save(sharp_model("mistral", sliding_window=24), tiny_tokenizer, folder)
    return folder


def exported(layout: Layout, dense: Path) -> Path:
    """Export a layout beside its dense checkpoint, unless another test did, and return the folder."""
    folder = dense.with_name(f"{dense.name}-{layout.hash}")
    if not folder.exists():
        export(layout, dense, folder, to="spkv")
    return folder


@pytest.fixture
def per_head(dense: Path) -> Path:
    """An export with heads of both kinds in a layer."""
    return exported(HEADS, dense)


@pytest.fixture
def in_process(verified_in_process: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the text of the program in this process, which saves the start of another; the Pythons it was for."""
    pythons: list[str] = []

    def run(command: list[str], **_: Any) -> None:
        python, option, text, *arguments = command
        pythons.append(python)
        monkeypatch.setattr(sys, "argv", [option, *arguments])
        exec(compile(text, "program", "exec"), {})

    monkeypatch.setattr(engine_check, "_STEPS", 20)  # more than twice the window
    monkeypatch.setattr(
        engine_check, "subprocess", SimpleNamespace(run=run, TimeoutExpired=TimeoutError)
    )
    return pythons


def edit(folder: Path, heads: tuple[str, ...], out: Path) -> Path:
    """Copy an export with other letters of heads, in its config and in its layout file."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((out / "config.json").read_text())
    config["spkv"]["layout"]["heads"] = heads
    (out / "config.json").write_text(json.dumps(config))
    replace(Layout.read(out / "layout.yaml"), heads=heads).write(out / "layout.yaml")
    (out / "spkv-manifest.json").unlink(missing_ok=True)
    return out


def test_the_model_passes_in_transformers(
    per_head: Path, in_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path of Python is found, though the engine runs in another working folder."""
    python = Path(sys.executable)
    monkeypatch.chdir(python.parent)
    check = compare_with_engine(per_head, "transformers", python=python.name)
    assert in_process == [str(python)]
    assert (check.passed, check.num_equal, check.num_new) == (True, 20, 20)
    assert check.difference < 1e-4 < 0.1 < check.dense_difference
    assert not any(replace(check, **one).passed for one in ({"num_equal": 19}, {"difference": 1.0}))
    assert (check.num_prompt, check.reach, check.cache, check.findings) == (
        136,
        f"window {WINDOW}",
        [],
        [],
    )
    assert compare_with_engine(per_head, "transformers", num_prompt=30).num_prompt == 30


@pytest.mark.usefixtures("in_process")
def test_a_wrong_layer_of_the_folder_is_named(per_head: Path, tmp_path: Path) -> None:
    wrong = edit(per_head, WRONG, tmp_path / "wrong")
    check = compare_with_engine(wrong, "transformers", layout=HEADS)
    assert not check.passed
    assert check.findings == [
        "layer 2: the engine runs LL instead of LG, as the folder's config says"
    ]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("layout", "answered", "finding"),
    [
        (HEADS, ("GL", "LL", "GG", "GG"), "layer 2: the engine runs GG instead of LG"),
        (HEADS, ("GG",) * 4, "the engine runs the dense checkpoint in every layer"),
        (
            HEADS,
            ("LL", "LL", "LG", "LL"),
            "no change of the windows of one layer explains the difference",
        ),
        (BY_LAYER, ("GL", "MM", "NG", "GN"), "layer 3: the engine runs GN instead of GM"),
    ],
)
def test_a_layer_that_the_engine_runs_otherwise_is_named(
    layout: Layout,
    answered: tuple[str, ...],
    finding: str,
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder is right, and the engine, which answers for another layout, is not."""
    right = exported(layout, dense)
    wrong, ask = edit(right, answered, tmp_path / "wrong"), engine_check._ask
    monkeypatch.setattr(engine_check, "_ask", lambda _, *arguments: ask(wrong, *arguments))
    check = compare_with_engine(right, "transformers")
    assert not check.passed
    assert check.num_prompt == max(layout.legend.values()) + 128
    assert check.reach == layout.reach
    assert check.findings == [finding]


@pytest.mark.usefixtures("in_process")
def test_sink_tokens_that_the_engine_does_not_run_are_named(
    dense: Path, per_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, folder = engine_check._ask, exported(replace(HEADS, sinks=1), dense)
    check = compare_with_engine(folder, "transformers")
    assert check.passed
    assert check.sink_difference is not None
    assert check.sink_difference > 0.1
    assert "without sink tokens they differ by" in str(check)
    monkeypatch.setattr(engine_check, "_ask", lambda _, *arguments: ask(per_head, *arguments))
    check = compare_with_engine(folder, "transformers")
    assert not check.passed
    assert check.findings == ["the engine runs local heads without the sink tokens"]


@pytest.mark.usefixtures("in_process")
def test_a_native_form_without_the_sink_tokens_of_a_layout_fails(
    dense: Path, tmp_path: Path
) -> None:
    """Its sliding layers counted as local by design, which get no sink tokens, so that it passed."""
    export(LAYERS, dense, tmp_path / "native")
    check = compare_with_engine(
        tmp_path / "native", "transformers", layout=replace(LAYERS, sinks=1)
    )
    assert not check.passed
    assert check.sink_difference == pytest.approx(check.difference, rel=1e-3)
    assert check.findings == ["the engine runs local heads without the sink tokens"]


@pytest.mark.usefixtures("in_process")
class TestNativeWindowOfAllLayers:
    """Global heads of Mistral see its sliding window."""

    def test_a_right_export_passes(self, mistral: Path) -> None:
        assert compare_with_engine(
            exported(replace(LAYERS, sinks=1), mistral), "transformers"
        ).passed

    @pytest.mark.parametrize(
        ("answered", "finding"),
        [
            (("GG", "GG", "LL", "GG"), "layer 1: the engine runs GG instead of LL"),
            (("GG",) * 4, "the engine runs the dense checkpoint in every layer"),
        ],
    )
    def test_a_wrong_layer_is_named(
        self,
        answered: tuple[str, ...],
        finding: str,
        mistral: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        right = exported(replace(LAYERS, sinks=1), mistral)
        wrong, ask = edit(right, answered, tmp_path / "wrong"), engine_check._ask
        monkeypatch.setattr(engine_check, "_ask", lambda _, *arguments: ask(wrong, *arguments))
        check = compare_with_engine(right, "transformers")
        assert not check.passed
        assert check.findings == [finding]

    def test_the_prompt_is_longer_than_the_native_window(
        self,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        save(sharp_model("mistral", sliding_window=200), tiny_tokenizer, tmp_path / "dense")
        export(LAYERS, tmp_path / "dense", tmp_path / "right", to="spkv")
        save(sharp_model("mistral", sliding_window=None), tiny_tokenizer, tmp_path / "unlimited")
        export(LAYERS, tmp_path / "unlimited", tmp_path / "wrong", to="spkv")
        ask = engine_check._ask
        monkeypatch.setattr(
            engine_check, "_ask", lambda _, *arguments: ask(tmp_path / "wrong", *arguments)
        )
        check = compare_with_engine(tmp_path / "right", "transformers")
        assert check.num_prompt == 328
        assert not check.passed


@pytest.mark.usefixtures("in_process")
def test_a_check_that_proves_nothing_fails(per_head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the layout the tokens get the same log-probabilities, as where every key is in the window."""
    monkeypatch.setattr(engine_check, "CONCLUSIVE", 1e9)
    check = compare_with_engine(per_head, "transformers")
    assert not check.passed
    assert "the check proves nothing" in str(check)


@pytest.mark.slow
def test_a_native_form_is_checked_in_plain_transformers(dense: Path, tmp_path: Path) -> None:
    assert export(LAYERS, dense, tmp_path / "native").target == "native"
    check = compare_with_engine(tmp_path / "native", "transformers")
    assert check.passed
    assert "spkv" not in check.engine


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("layer", "finding"), [(0, "LL instead of GG"), (2, "GG instead of LL")])
def test_a_wrong_layer_of_a_native_form_is_named(
    layer: int, finding: str, dense: Path, tmp_path: Path
) -> None:
    """A layer that slides in the config does not count as local by design, which no layout widens."""
    wrong = swap(dense, layer, tmp_path)
    check = compare_with_engine(wrong, "transformers", layout=LAYERS)
    assert not check.passed
    assert check.findings == [
        f"layer {layer}: the engine runs {finding}, as the folder's config says"
    ]


def test_the_reason_of_an_engine_is_one_line() -> None:
    error = (
        "ValidationError: 1 error\n  Value error, vLLM serves no x\nserve it [type=value_error, y]"
    )
    assert engine_check._reason(error, False, "python") == "vLLM serves no x serve it"
    assert engine_check._reason("Model type spkv not supported", False, "python").endswith(
        "environment of python"
    )


def test_the_layout_of_a_native_form_is_read(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    model = tiny_model("gemma3_text", layer_types=kinds, sliding_window=4)
    assert native_layout(model.config) == Layout(("LL", "GG") * 2, 4)
    assert native_layout(tiny_model("llama").config) is None


def test_a_prompt_that_fits_into_the_window_is_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = tiny_model("llama", vocab_size=300)
    apply_layout(model, Layout(HEADS.heads, 120))
    save(model, tiny_tokenizer, tmp_path / "hybrid")
    with pytest.raises(UserError, match="a check proves nothing"):
        compare_with_engine(tmp_path / "hybrid", "transformers")


@pytest.mark.parametrize("length", [WINDOW, 512 - 31])
def test_a_prompt_must_fit_between_window_and_positions(per_head: Path, length: int) -> None:
    with pytest.raises(UserError, match=r"longer than the window of 8, and at most 448 tokens"):
        compare_with_engine(per_head, "transformers", num_prompt=length)


def test_a_dense_folder_is_refused(dense: Path) -> None:
    with pytest.raises(UserError, match="has no layout to check"):
        compare_with_engine(dense, "transformers")


@pytest.mark.parametrize(
    ("engine", "package"), [("vllm", "vllm"), ("mlx", "mlx_lm"), ("llamacpp", "llama_cpp")]
)
def test_a_missing_engine_is_named(engine: str, package: str, per_head: Path) -> None:
    with pytest.raises(UserError, match=f"{package} is not installed here"):
        compare_with_engine(per_head, engine)


class TestCommands:
    @pytest.mark.usefixtures("in_process")
    def test_serve_check_exits_with_its_verdict(
        self, per_head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wrong = edit(per_head, WRONG, tmp_path / "wrong")
        HEADS.write(tmp_path / "layout.yaml")
        arguments = ["--engine", "transformers", "--layout", str(tmp_path / "layout.yaml")]
        main(["serve-check", str(per_head), *arguments])
        assert "computes what the model does" in capsys.readouterr().out
        with pytest.raises(SystemExit) as exit_:
            main(["serve-check", str(wrong), *arguments])
        assert exit_.value.code == 1
        printed = " ".join(capsys.readouterr().out.split())
        assert "computes something else" in printed
        assert "layer 2: the engine runs LL instead of LG" in printed


@needs_vllm
@pytest.mark.slow
class TestVllm:
    """In vLLM itself, whose Python is SPKV_VLLM_PYTHON."""

    def run(self, folder: Path, **options: Any) -> EngineCheck:
        return compare_with_engine(folder, "vllm", python=PYTHON, **options)

    def has_planned_capacity(self, check: EngineCheck, layout: Layout) -> bool:
        """Compare the requests that fit, as vLLM reports them, with the plan for blocks of 128 tokens."""
        line = next(line for line in check.cache if "requests of" in line)
        numbers = (float(number.replace(",", "")) for number in re.findall(r"[\d.,]*\d", line))
        blocks, block_kib, _, requests, context, in_flight = numbers
        head = LayerCache(num_heads=1, key_dim=32, value_dim=32, sinks=layout.sinks)
        parts = count_parts(layout.head_windows, 0, head)
        model = ModelCache(tuple(parts.elements()), dtype="float32", is_split=True)
        settings = CacheSettings(page_size=128, in_flight=int(in_flight))
        plan = VLLM.plan(model, settings, int(context))
        fitting = plan.concurrency(int(blocks * block_kib * 1024))
        return plan.page_bytes == block_kib * 1024 and fitting == pytest.approx(requests, rel=1e-2)

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("layout", [HEADS, LAYERS, WINDOWS], ids=["heads", "layers", "windows"])
    def test_families_are_exact(
        self, family: str, layout: Layout, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        save_with_tokenizer(sharp_model(family), tiny_tokenizer, tmp_path / "dense")
        export(layout, tmp_path / "dense", tmp_path / "out", to="spkv")
        check = self.run(tmp_path / "out")
        assert check.passed, str(check)
        assert any("window of" in line for line in check.cache)
        # Which has native windows as well
        assert family == "gemma3_text" or self.has_planned_capacity(check, layout)

    @pytest.mark.parametrize(("sinks", "last", "most"), [(0, "640", "1,024"), (1, "768", "1,152")])
    def test_a_long_request_holds_less_than_full_attention(
        self, sinks: int, last: str, most: str, dense: Path, tmp_path: Path
    ) -> None:
        """4 global heads keep 4 blocks of 128 tokens, 4 local ones 1, and 1 for the first; in the first step, all 4."""
        export(replace(HEADS, sinks=sinks), dense, tmp_path / "out")
        check = self.run(tmp_path / "out", num_prompt=448)
        assert check.passed, str(check)
        held = (
            f"this request held {last} KiB at its end, {most} KiB at most; full attention 1,024 KiB"
        )
        assert check.cache[-1] == held

    def test_learned_sinks_are_exact(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model = sharp_model()
        apply_layout(model, HEADS)
        add_learned_sinks(model, [torch.randn(4) + 2 for _ in range(4)])
        save(model, tiny_tokenizer, tmp_path / "out")
        assert self.run(tmp_path / "out").passed

    def test_a_wrong_layer_is_named(self, per_head: Path, tmp_path: Path) -> None:
        check = self.run(edit(per_head, WRONG, tmp_path / "wrong"), layout=HEADS)
        assert not check.passed
        assert check.findings == [
            "layer 2: the engine runs LL instead of LG, as the folder's config says"
        ]

    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "olmo2"])
    @pytest.mark.parametrize("layout", [HEADS, LAYERS, WINDOWS], ids=["heads", "layers", "windows"])
    def test_a_sink_token_is_exact(
        self, family: str, layout: Layout, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        save_with_tokenizer(sharp_model(family), tiny_tokenizer, tmp_path / "dense")
        export(replace(layout, sinks=1), tmp_path / "dense", tmp_path / "out", to="spkv")
        check = self.run(tmp_path / "out")
        assert check.passed, str(check)
        assert check.sink_difference is not None
        assert any("the first token of a request" in line for line in check.cache)
        assert family == "gemma3_text" or self.has_planned_capacity(check, replace(layout, sinks=1))

    def test_several_sink_tokens_are_refused(self, dense: Path, tmp_path: Path) -> None:
        export(replace(HEADS, sinks=2), dense, tmp_path / "out")
        with pytest.raises(UserError, match="see the first 2 tokens"):
            self.run(tmp_path / "out")


@needs_mlx
@pytest.mark.slow
class TestMlx:
    """In mlx-lm itself, whose Python is SPKV_MLX_PYTHON."""

    def run(self, folder: Path, **options: Any) -> EngineCheck:
        return compare_with_engine(folder, "mlx", python=MLX, **options)

    @pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "olmo2", "smollm3"])
    def test_families_are_exact(
        self, family: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Of the forms, mlx-lm has a cache of the window for OLMo 3 alone; a SmolLM3 masks the keys that it holds."""
        save_with_tokenizer(
            sharp_model(family, tie_word_embeddings=False), tiny_tokenizer, tmp_path / "dense"
        )
        export(LAYERS, tmp_path / "dense", tmp_path / "out", engine="mlx")
        check = self.run(tmp_path / "out")
        assert check.passed, str(check)
        tokens = check.num_prompt + check.num_new
        kept = [
            f"KVCache: 2 layers hold {tokens} keys",
            f"RotatingKVCache: 2 layers hold {WINDOW} keys",
        ]
        assert check.cache[:-1] == (
            kept if family == "olmo2" else [f"KVCache: 4 layers hold {tokens} keys"]
        )

    def test_bfloat16_weights_run_in_float32(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        save(sharp_model().bfloat16(), tiny_tokenizer, tmp_path / "dense")
        export(LAYERS, tmp_path / "dense", tmp_path / "out", engine="mlx")
        assert self.run(tmp_path / "out").passed

    @pytest.mark.parametrize(
        ("layer", "finding"), [(0, "LL instead of GG"), (2, "GG instead of LL")]
    )
    def test_a_wrong_layer_is_named(
        self, layer: int, finding: str, dense: Path, tmp_path: Path
    ) -> None:
        check = self.run(swap(dense, layer, tmp_path, engine="mlx"), layout=LAYERS)
        assert not check.passed
        assert check.findings == [
            f"layer {layer}: the engine runs {finding}, as the folder's config says"
        ]

    def test_a_layout_per_head_is_refused(self, per_head: Path) -> None:
        with pytest.raises(UserError, match="Model type spkv not supported"):
            self.run(per_head)
