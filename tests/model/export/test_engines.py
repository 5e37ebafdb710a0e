"""Test the table of what engines do with exports, and what the command prints and refuses because of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import HEADS
from helpers import fails, save_with_tokenizer, tiny_model
from paths import ROOT
from transformers import AutoConfig, PreTrainedTokenizerBase

from spkv_nas import Layout, UserError
from spkv_nas.cli import main
from spkv_nas.engines.engine import Engine
from spkv_nas.engines.forms import FORMS, UNTRIED, form_name
from spkv_nas.engines.known import Mlx, Transformers
from spkv_nas.engines.outcome import Cell, Outcome
from spkv_nas.engines.registry import (
    ENGINES,
    GUARD_KEYS,
    guards,
    objection,
    outcomes,
)
from spkv_nas.engines.vllm import Vllm
from spkv_nas.model.checkpoint import save
from spkv_nas.model.export import native, verify_export
from spkv_nas.model.export.export import export
from spkv_nas.model.export.native import native_config
from spkv_nas.model.export.registry import AUTO, chosen_targets
from spkv_nas.model.windows import add_learned_sinks, apply_layout

LAYERWISE = Layout(("GG", "LL", "LL", "GG"), 6)
FULL, SLIDING = "full_attention", "sliding_attention"


def cells(form: str) -> dict[Engine, Cell]:
    """Return what each engine does with a form, whatever the settings of the model."""
    return {engine: engine.outcomes.get(form, UNTRIED) for engine in ENGINES}


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the comparison with plain transformers, which other tests run."""
    monkeypatch.setattr(verify_export, "check", lambda *_: 0.0)


def dense(family: str, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    save_with_tokenizer(tiny_model(family, vocab_size=300), tokenizer, folder)
    return folder


def test_every_form_that_is_written_has_a_row() -> None:
    """No engine that was run runs any of them dense; vLLM's Cohere 2 is the only one that differs."""
    kinds = {*native._NATIVE, *native._SUCCESSOR.values(), "granite_swa", "spkv"}
    assert {form.partition(" ")[0] for form in FORMS} == kinds
    for engine in ENGINES:
        assert {*engine.outcomes, *engine.ignores_windows} <= {*FORMS}
        assert (engine.guard_key is None) == (not engine.ignores_windows)
    for form in FORMS:
        known = {engine.name: cell.outcome for engine, cell in cells(form).items()}
        assert known.keys() == {*ENGINES.names}
        run = {
            engine.name: cell.outcome for engine, cell in cells(form).items() if not cell.is_read
        }
        assert Outcome.DENSE not in run.values()
        different = [name for name, outcome in run.items() if outcome is Outcome.DIFFERENT]
        assert different == (["vllm"] if form.startswith("cohere2") else [])
        for engine in ENGINES:
            assert form not in engine.ignores_windows or known[engine.name] is Outcome.REFUSED
    assert {cell.outcome for cell in cells("third-party").values()} == {Outcome.UNTRIED}


def test_layers_of_a_family_are_told_from_others() -> None:
    gemma = [SLIDING] * 5 + [FULL] + [SLIDING] * 2
    assert form_name("gemma3_text", gemma) == "gemma3_text"
    assert form_name("gemma3_text", gemma[1:]) == "gemma3_text with other layers"
    assert form_name("gpt_oss", [SLIDING, FULL] * 2) == "gpt_oss"
    assert form_name("qwen3", [SLIDING, FULL] * 2) == "qwen3"
    assert guards("gemma3_text") == guards("ministral") == guards("olmo3") == {}
    assert guards("smollm3") == {
        "lm_config": {"architectures": ["layer_types of smollm3 are ignored by llama.cpp"]}
    }
    assert guards("cohere2 with other layers").keys() == set(GUARD_KEYS)


@pytest.mark.usefixtures("unchecked")
def test_loaders_that_ignore_windows_are_stopped(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    exported = export(
        LAYERWISE, dense("qwen3", tmp_path / "dense", tiny_tokenizer), tmp_path / "out"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_file"] == "layer_types of qwen3 are ignored by mlx-lm"
    assert config["lm_config"] == {
        "architectures": ["layer_types of qwen3 are ignored by llama.cpp"]
    }
    assert exported.engines["mlx-lm 0.32.2"] == "refused"
    assert (
        exported.engines["vLLM 0.32"] == "exact (with --model-impl transformers; refused without)"
    )
    assert exported.engines["SGLang 0.5.23"] == "dense (read, not run)"


def test_keys_of_an_earlier_export_are_not_kept() -> None:
    """Layers that an engine assumes need no key."""
    config = tiny_model("gpt_oss").config
    config.lm_config = guards("gpt_oss with other layers")["lm_config"]
    exported = native_config(config, Layout(("LL", "GG") * 2, 8)).to_dict()
    assert exported["layer_types"] == [SLIDING, FULL] * 2
    assert not set(GUARD_KEYS) & exported.keys()


@pytest.mark.usefixtures("unchecked")
def test_olmo_has_a_rope_base_in_both_formats(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """mlx-lm refuses OLMo 3 without the older one."""
    folder = dense("olmo2", tmp_path / "dense", tiny_tokenizer)
    exported = export(LAYERWISE, folder, tmp_path / "out", engine="mlx")
    assert exported.target == "native"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"][SLIDING]["rope_theta"] == 10_000
    assert "rope_scaling" not in config


@pytest.mark.usefixtures("unchecked")
def test_the_command_prints_what_engines_do(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    LAYERWISE.write(tmp_path / "layout.yaml")
    model = dense("llama", tmp_path / "dense", tiny_tokenizer)
    arguments = ["export", str(tmp_path / "layout.yaml"), "--model", str(model), "--out"]
    main([*arguments, str(tmp_path / "out"), "--for", "vllm"])
    printed = capsys.readouterr().out
    assert (
        "not run here (serve-check runs an engine):\n  vLLM 0.32: exact\n  transformers 5.23.0: exact\n"
        in printed
    )
    assert "\n  mlx-lm 0.32.2: refused\n" in printed
    assert printed.endswith("target: native\n")
    message = fails(capsys, *arguments, tmp_path / "other", "--for", "openvino")
    assert "not exported as native: OpenVINO GenAI 2026.4.1 refuses the form ministral" in message
    assert (
        "not exported as granite_swa: OpenVINO GenAI 2026.4.1 was not tried with the form granite_swa"
        in message
    )
    assert "leave the engine out, or name another one" in message
    assert not (tmp_path / "other").exists()
    assert "unknown engine 'gpt4all'" in fails(
        capsys, *arguments, tmp_path / "other", "--for", "gpt4all"
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("refused", "served", "form"),
    [
        (replace(HEADS, sinks=2), replace(HEADS, sinks=1), "several sink tokens"),
        (
            Layout.from_windows(((None, 4), (5, 6), (7, 7), (None, None))),
            Layout.from_windows(((None, 4), (5, 6), (6, 6), (None, None))),
            "more than 3 windows",
        ),
    ],
)
def test_several_sink_tokens_and_four_windows_are_not_for_vllm(
    refused: Layout,
    served: Layout,
    form: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The plug-in refuses them, so ``--for`` must not promise otherwise."""
    model = dense("llama", tmp_path / "dense", tiny_tokenizer)
    with pytest.raises(UserError, match=rf"vLLM 0\.32 refuses the form spkv with {form}"):
        export(refused, model, tmp_path / "refused", engine="vllm")
    assert export(served, model, tmp_path / "served", engine="vllm").target == "spkv"
    assert export(refused, model, tmp_path / "any").engines["vLLM 0.32"] == "refused"


@pytest.mark.usefixtures("unchecked")
def test_a_sink_token_beside_learned_sinks_is_not_for_vllm(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = tiny_model("llama", vocab_size=300)
    apply_layout(model, Layout(("GL", "LL", "LL", "GG"), 6, sinks=1))
    add_learned_sinks(model)
    save(model, tiny_tokenizer, tmp_path / "hybrid")
    with pytest.raises(UserError, match="refuses the form spkv with both kinds of sinks"):
        export(None, tmp_path / "hybrid", tmp_path / "out", engine="vllm")


def test_what_an_engine_would_run_wrong_is_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, outcome in (
        (Vllm, Outcome.DENSE),
        (Transformers, Outcome.DIFFERENT),
        (Mlx, Outcome.EXACT),
    ):
        monkeypatch.setattr(kind, "outcomes", {"old": Cell(outcome)})
    config = tiny_model("olmo3").config
    assert (
        objection("old", config, "vllm")
        == "vLLM 0.32 runs, dense and without an error, the form old"
    )
    assert objection("old", config, "transformers") == (
        "transformers 5.23.0 computes, without an error, something else with the form old"
    )
    assert objection("old", config, "mlx") is None
    with pytest.raises(UserError, match="unknown engine 'x'; expected one of vllm, transformers"):
        objection("old", config, "x")


@pytest.mark.usefixtures("unchecked")
def test_mlx_is_a_smollm3_for_weights_like_llama(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    exported = export(
        LAYERWISE,
        dense("llama", tmp_path / "dense", tiny_tokenizer),
        tmp_path / "out",
        engine="mlx",
    )
    assert (exported.target, list(exported.rejected)) == (
        "mlx",
        [one.name for one in chosen_targets(AUTO, {})],
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["no_rope_layers"], config["sliding_window"]) == (
        "smollm3",
        [1] * 4,
        6,
    )
    assert config["layer_types"] == [FULL, SLIDING, SLIDING, FULL]
    assert config["lm_config"] == {
        "architectures": ["layer_types of smollm3 are ignored by llama.cpp"]
    }


@pytest.mark.parametrize(
    ("family", "options", "layout", "message"),
    [
        ("qwen3", {}, LAYERWISE, "mlx-lm 0.32.2 refuses the form qwen3"),
        ("llama", {}, Layout(("LL",) * 4, 6), "mlx-lm needs a layer of global heads"),
        ("llama", {}, Layout(("GL", "LL", "LL", "GG"), 6), "layer 0 mixes global and local heads"),
        (
            "llama",
            {"hidden_act": "gelu"},
            LAYERWISE,
            "was not checked with hidden_act gelu in the form smollm3",
        ),
    ],
)
def test_what_mlx_cannot_express(
    family: str, options: dict[str, object], layout: Layout, message: str
) -> None:
    from spkv_nas.model.export.native import MlxTarget

    assert message in (MlxTarget().can_express(tiny_model(family, **options).config, layout) or "")


def test_mlx_takes_native_forms_that_mlx_lm_runs() -> None:
    from spkv_nas.model.export.native import MlxTarget

    config = tiny_model("olmo2").config
    assert (
        MlxTarget().architecture(config, LAYERWISE).to_dict()
        == native_config(config, LAYERWISE).to_dict()
    )


def rope(kind: str, **parameters: object) -> dict[str, object]:
    return {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        **parameters,
    }


LOW_HIGH = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LOCAL = {"rope_type": "default", "rope_theta": 5e3}


@pytest.mark.parametrize(
    ("family", "options", "form", "unchecked"),
    [
        ("llama", {"rope_parameters": rope("linear")}, "smollm3", ""),
        ("llama", {"rope_parameters": rope("llama3", **LOW_HIGH)}, "smollm3", ""),
        ("llama", {"rope_parameters": rope("yarn", beta_fast=16.0)}, "smollm3", ""),
        ("llama", {"rope_parameters": rope("yarn", attention_factor=0.7)}, "smollm3", "attention_factor 0.7"),
        ("llama", {"rope_parameters": rope("dynamic")}, "smollm3", "rope_type dynamic"),
        ("llama", {"rope_parameters": rope("longrope", **FACTORS)}, "smollm3", "rope_type longrope, .*short_factor"),
        ("llama", {"rope_parameters": rope("default", partial_rotary_factor=0.5)}, "smollm3", "partial_rotary_factor"),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, "smollm3", ""),
        ("gemma3_text", {"rope_parameters": {FULL: rope("linear"), SLIDING: LOCAL}}, "gemma3_text", ""),
        ("gemma3_text", {"rope_parameters": {FULL: LOCAL, SLIDING: rope("linear")}}, "gemma3_text", "sliding_rope"),
        ("gemma3_text", {"query_pre_attn_scalar": 48}, "gemma3_text", ""),
        ("gemma3_text", {"final_logit_softcapping": 5.0}, "gemma3_text", "final_logit_softcapping 5.0"),
        ("gemma3_text", {"hidden_activation": "silu"}, "gemma3_text", "hidden_activation silu"),
        ("olmo3", {"rope_parameters": {FULL: rope("yarn"), SLIDING: LOCAL | {"rope_theta": 1e4}}}, "olmo3", ""),
        ("olmo3", {"rope_parameters": {FULL: rope("yarn"), SLIDING: LOCAL}}, "olmo3", "sliding_rope_theta 5000"),
    ],
)  # fmt: skip
def test_settings_that_an_engine_was_not_run_with(
    family: str, options: dict[str, object], form: str, unchecked: str
) -> None:
    """The table went by model type: "exact" for a Gemma 3 with scaled RoPE, which mlx-lm computed otherwise."""
    from spkv_nas.model.export.native import MlxTarget, _smollm3_config

    config = tiny_model(family, **options).config
    architecture = _smollm3_config(config, LAYERWISE) if form == "smollm3" else config
    reason = objection(form, architecture, "mlx")
    outcome = outcomes(form, architecture)["mlx-lm 0.32.2"]
    if unchecked:
        assert reason is not None
        assert re.fullmatch(
            f"mlx-lm 0.32.2 was not checked with {unchecked}.* in the form {form}", reason
        )
        assert outcome.startswith("not checked (with ")
        assert form == "gemma3_text" or reason in (MlxTarget().can_express(config, LAYERWISE) or "")
    else:
        assert reason is None
        assert outcome.startswith("exact")


def test_exact_needs_settings() -> None:
    """Every cell says with which settings the engine was run; an unknown setting of a class makes it not checked."""
    for form in FORMS:
        for engine, cell in cells(form).items():
            is_compared = engine.name == "transformers" or form.startswith("spkv")
            assert (
                is_compared
                or cell.outcome is not Outcome.EXACT
                or form.split(" ")[0] in engine.tried
            )
    config = tiny_model("qwen3").config
    assert outcomes("qwen3", config)["OpenVINO GenAI 2026.4.1"].startswith("exact")
    yarn = tiny_model("olmo3", rope_parameters={FULL: rope("yarn"), SLIDING: rope("yarn")}).config
    assert outcomes("olmo3", yarn)["vLLM 0.32"] == "exact"
    config.new_multiplier = 2.0
    assert (
        outcomes("qwen3", config)["OpenVINO GenAI 2026.4.1"]
        == "not checked (with new_multiplier 2.0)"
    )
    assert outcomes("qwen3", config)["mlx-lm 0.32.2"] == "refused"
    assert (
        outcomes("spkv", tiny_model("opt").config)["vLLM 0.32"]
        == "not checked (with model type opt)"
    )


@pytest.mark.usefixtures("unchecked")
def test_gemma_has_its_rope_in_both_formats(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """mlx-lm reads the older keys alone, without which it used its default bases, unscaled."""
    rotary = {FULL: {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0}, SLIDING: LOCAL}
    kinds = [SLIDING] * 5 + [FULL]
    model = tiny_model(
        "gemma3_text",
        vocab_size=300,
        num_hidden_layers=6,
        layer_types=kinds,
        rope_parameters=rotary,
    )
    save(model, tiny_tokenizer, tmp_path / "dense")
    exported = export(
        Layout(("LL",) * 5 + ("GG",), 4), tmp_path / "dense", tmp_path / "out", engine="mlx"
    )
    assert exported.engines["mlx-lm 0.32.2"].startswith("exact")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e5, 5e3)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    again = AutoConfig.from_pretrained(tmp_path / "out")
    assert again.rope_parameters == model.config.rope_parameters


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "support-matrix.md").read_text()
    for form in FORMS:
        row = " | ".join(str(cell) for cell in cells(form).values())
        assert f"| {form} | {row} |" in text
    assert f"| form | {' | '.join(engine.full_title for engine in ENGINES)} |" in text
    for engine in ENGINES:
        for form, settings in engine.tried.items():
            values = {
                key: "" if tried is None else f" ({', '.join(map(str, tried))})"
                for key, tried in settings.items()
            }
            tried = ", ".join(f"`{key}`{value}" for key, value in values.items()) or "-"
            assert f"| {engine.full_title} | {form} | {tried} |" in text
