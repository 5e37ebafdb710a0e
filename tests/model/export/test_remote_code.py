"""Test the code in exports: a process without this package computes what the hybrid does, in every family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    FAMILIES,
    equal_up_to_rounding,
    save_with_tokenizer,
    sharpen_attention,
    tiny_model,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas import Layout, apply_layout
from spkv_nas.base.errors import UserError
from spkv_nas.engines.registry import ENGINES
from spkv_nas.model.attention import attention_layers
from spkv_nas.model.export import verify_export
from spkv_nas.model.export.export import export
from spkv_nas.model.windows import add_learned_sinks

HEADS = Layout(("GL", "LL", "LG", "GG"), 6)
WINDOWS = Layout.from_windows(((None, 4), (7, 2), (7, 7), (None, None)))
PROMPTS = ((5, 9, 4, 33, 8, 60, 7, 70, 3, 31, 12, 44), (0, 0, 0, 0, 0, 17, 81, 6, 20, 9, 91, 14))
NEW = 8

# What the process without this package runs; spkv_nas is installed, so its import is blocked
PROGRAM = """
import json, sys
sys.modules["spkv_nas"] = sys.modules["spkv_kernels"] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
request = json.load(open(sys.argv[1]))
prompts, tokens = torch.tensor(request["prompts"]), torch.tensor(request["tokens"])
is_token = (prompts != 0).long()
for folder in request["folders"]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    generate = lambda **options: model.generate(
        prompts, attention_mask=is_token, max_new_tokens=request["new"], do_sample=False, **options)
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    result = {f"grad.{name}": x.grad for name, x in model.named_parameters() if x.grad is not None}
    result |= {"logits": output.logits.detach(), "greedy": generate(), "beams": generate(num_beams=3)}
    save_file({name: x.contiguous().clone() for name, x in result.items()}, folder + "/answer.safetensors")
    if request["again"] == folder:
        model.save_pretrained(folder + "-again")
        again = AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True).eval()
        assert torch.allclose(again(tokens).logits, model(tokens).logits, atol=1e-5)  # weights lie elsewhere
        again.set_attn_implementation("eager")
        try:
            again(tokens)
            raise SystemExit("another attention function was taken")
        except ValueError as error:
            assert "would ignore the layout" in str(error), error
        try:
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
            raise SystemExit("the folder was loaded without trust")
        except ValueError as error:
            assert "trust_remote_code=True" in str(error), error
"""


@dataclass
class Case:
    """Hybrid to export."""

    family: str
    layout: Layout = HEADS
    options: dict[str, Any] = field(default_factory=dict)
    learned_sinks: bool = False


SHARED_KEYS: dict[str, Any] = {  # layers 4 and 5 read the keys of 2 and 3
    "head_dim": 8, "global_head_dim": 8, "num_hidden_layers": 6, "sliding_window": 9, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
}  # fmt: skip
STATE_SPACES: dict[str, Any] = {
    "head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}  # fmt: skip
CASES = {
    **{family: Case(family) for family in FAMILIES},
    "windows": Case("llama", WINDOWS),
    "sinks": Case("qwen2", Layout(HEADS.heads, 4, sinks=2)),
    "learned": Case("llama", WINDOWS, learned_sinks=True),
    "gemma3-wide": Case("gemma3_text", Layout(HEADS.heads, 3, sinks=2), {"sliding_window": 9}),
    "mistral-sinks": Case("mistral", Layout(HEADS.heads, 3, sinks=2), {"sliding_window": 6}),
    "both-sinks": Case("qwen3", Layout(HEADS.heads, 4, sinks=1), learned_sinks=True),
    "mqa": Case(
        "llama", Layout(("L", "G", "L", "L"), 5), {"num_key_value_heads": 1, "attention_bias": True}
    ),
    "gpt-oss": Case("gpt_oss", HEADS),
    "shared-keys": Case("gemma4_text", Layout(("GL",) * 4, 4, sinks=1), SHARED_KEYS),
    "state-spaces": Case("falcon_h1", HEADS, STATE_SPACES),
}


def hybrid(case: Case) -> PreTrainedModel:
    """Make the random hybrid of a case."""
    model = sharpen_attention(tiny_model(case.family, vocab_size=300, **case.options), 6)
    apply_layout(model, case.layout)
    if case.learned_sinks:
        add_learned_sinks(model, [torch.linspace(0.3, 3.0, 4) + layer for layer in range(4)])
    return model


def run_plain(folder: Path, program: str, request: dict[str, Any]) -> None:
    """Run a program in a process that cannot import this package."""
    (folder / "request.json").write_text(json.dumps(request))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, "-c", program, str(folder / "request.json")],
        cwd=folder,
        env={**environment, "HF_MODULES_CACHE": str(folder / "modules")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


def close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether tensors agree, relative to the largest value."""
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


@pytest.mark.usefixtures("fresh_process")
def test_a_process_without_this_package_answers(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Windows per head and learned sinks, compared in a real process when they are exported."""
    save_with_tokenizer(hybrid(CASES["learned"]), tiny_tokenizer, tmp_path / "hybrid")
    exported = export(None, tmp_path / "hybrid", tmp_path / "out", to="spkv")
    assert "plain transformers loads it with trust_remote_code=True: over " in exported.form


@pytest.mark.slow
@pytest.mark.usefixtures("verified_in_process")
def test_a_process_without_this_package_computes_the_hybrid(
    tokens: Tensor, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Logits, gradients, greedy tokens and beams of a batch with padding on the left, and a folder saved again."""
    # Export every case
    models = {name: hybrid(case) for name, case in CASES.items()}
    for name, model in models.items():
        save_with_tokenizer(model, tiny_tokenizer, tmp_path / f"{name}-hybrid")
        exported = export(None, tmp_path / f"{name}-hybrid", tmp_path / name, to="spkv")
        assert "plain transformers loads it with trust_remote_code=True: over " in exported.form
    # Run them without this package
    request = {
        "folders": [str(tmp_path / name) for name in models],
        "again": str(tmp_path / "learned"),
    }
    run_plain(
        tmp_path, PROGRAM, request | {"prompts": PROMPTS, "tokens": tokens.tolist(), "new": NEW}
    )
    # Compare
    prompts = torch.tensor(PROMPTS)
    for name, model in models.items():
        answer = load_file(tmp_path / name / "answer.safetensors")
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        assert close(answer["logits"], output.logits, 1e-5), name
        for parameter_name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert close(answer[f"grad.{parameter_name}"], parameter.grad, 1e-4), (
                    name,
                    parameter_name,
                )
        for kind, options in (("greedy", {}), ("beams", {"num_beams": 3})):
            model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
            generated = model.generate(
                prompts,
                attention_mask=(prompts != 0).long(),
                max_new_tokens=NEW,
                do_sample=False,
                **options,
            )
            assert torch.equal(answer[kind], generated), (name, kind)
    # With this package imported, its classes load both folders
    for folder in (tmp_path / "learned", tmp_path / "learned-again"):
        reloaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert attention_layers(reloaded)
        assert not hasattr(reloaded.config, "auto_map")
        assert equal_up_to_rounding(reloaded(tokens).logits, models["learned"](tokens).logits)


def test_code_that_computes_something_else_is_left_out(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export stays, for spkv_nas and vLLM, and says so."""
    save_with_tokenizer(hybrid(CASES["llama"]), tiny_tokenizer, tmp_path / "hybrid")
    monkeypatch.setattr(verify_export, "TOLERANCE", -1.0)
    exported = export(None, tmp_path / "hybrid", tmp_path / "out", to="spkv")
    assert (
        "plain transformers refuses it, because its code was left out: its logits in plain"
        in exported.form
    )
    assert not (tmp_path / "out" / "modeling_spkv.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported.engines[ENGINES["transformers"].full_title] == "refused"
    with pytest.raises(UserError, match="its code was left out"):
        export(None, tmp_path / "hybrid", tmp_path / "for", to="spkv", engine="transformers")


@pytest.mark.slow
def test_lm_eval_runs_a_task(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """A process without this package evaluates a folder, offline."""
    pytest.importorskip("lm_eval")
    save_with_tokenizer(hybrid(CASES["llama"]), tiny_tokenizer, tmp_path / "hybrid")
    export(None, tmp_path / "hybrid", tmp_path / "out", to="spkv")
    rows = [
        {"context": "def f(x):", "right": " return x", "wrong": f" {number}"} for number in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "mine",
        "dataset_path": "json",
        "output_type": "multiple_choice",
        "test_split": "test",
    }
    task |= {
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "doc_to_text": "{{context}}",
    }
    task |= {
        "doc_to_choice": "{{[right, wrong]}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(task))
    program = f"""
import sys
sys.modules["spkv_nas"] = sys.modules["spkv_kernels"] = None
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
model = {{"pretrained": {str(tmp_path / "out")!r}, "trust_remote_code": True}}
tasks = TaskManager(include_path={str(tmp_path)!r}, include_defaults=False)
print(simple_evaluate("hf", model, ["mine"], task_manager=tasks, device="cpu", bootstrap_iters=0)["results"])
"""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, env={**os.environ, **offline}, capture_output=True, text=True, check=False
    )
    assert "'acc,none': " in result.stdout, result.stderr
