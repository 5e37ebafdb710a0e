"""Test that a lack of memory is reported in one line within seconds, before the system ends the process."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import change_config
from configs import CONFIGS
from helpers import Recorder, fails, tiny_model
from transformers import AutoConfig, PreTrainedTokenizerBase

from spkv_nas.base import memory
from spkv_nas.base.errors import UserError
from spkv_nas.base.memory import available_bytes, require
from spkv_nas.evaluation import micro_batch
from spkv_nas.model.checkpoint import save
from spkv_nas.model.model_shape import (
    check_keys,
    check_length,
    check_size,
    check_tokens,
    num_positions,
)
from spkv_nas.stages.evaluate.nll import nll
from spkv_nas.stages.options import SubjectOptions
from spkv_nas.stages.options.evaluate.nll import NLLOptions
from spkv_nas.stages.subject import Subject

GIB = 1 << 30


def groups(folder: Path, limit: int | str, use: int, given_back: int = 0) -> int:
    """Return the available memory of a process in a control group with this limit, use and file cache."""
    group = folder / "mount" / "a" / "b"
    group.mkdir(parents=True)
    for name, value in {
        "max": limit,
        "current": use,
        "stat": f"anon 5\ninactive_file {given_back}",
    }.items():
        (group.parent / f"memory.{name}").write_text(f"{value}\n")
    (folder / "cgroup").write_text("3:cpu,cpuacct:/x\n0::/a/b\n")
    return min(memory._left_to_groups(folder / "cgroup", folder / "mount"))


class TestControlGroups:
    def test_limit_of_a_parent_group(self, tmp_path: Path) -> None:
        assert groups(tmp_path, 8 * GIB, 3 * GIB) == 5 * GIB

    def test_file_cache_does_not_count_as_use(self, tmp_path: Path) -> None:
        assert groups(tmp_path, 8 * GIB, 7 * GIB, 6 * GIB) == 7 * GIB

    def test_none(self, tmp_path: Path) -> None:
        assert groups(tmp_path, "max", 3 * GIB) == 1 << 62


def test_no_groups_at_all(tmp_path: Path) -> None:
    assert memory._left_to_groups(tmp_path / "none", tmp_path) == [1 << 62]


def test_available_memory() -> None:
    assert 0 < available_bytes() < 1 << 62
    require(1, "a byte", "")
    with pytest.raises(
        UserError,
        match=r"^a table: needs at least .* TiB of memory, but only .* is available\nsell it$",
    ):
        require(1e18, "a table", "sell it")


class TestConfigs:
    def test_model_that_fits(self) -> None:
        model = tiny_model()
        assert check_size(model.config, 4) >= model.num_parameters()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"hidden_size": 1 << 20}, "the model: .* parameters: needs at least .* TiB"),
            ({"num_hidden_layers": 1001}, "more than 1,000"),
            ({"num_local_experts": 10**9, "model_type": "mixtral"}, "more than 100,000"),
            ({"hidden_size": 10**25}, "exceed any machine's memory"),
        ],
    )
    def test_invalid_sizes(self, options: dict[str, object], message: str) -> None:
        config = {
            "model_type": "llama",
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            **options,
        }
        with pytest.raises(UserError, match=message):
            check_size(AutoConfig.for_model(**config), 4)

    @pytest.mark.parametrize(
        ("kind", "options", "message"),
        [
            (
                "llama",
                {"num_keY_value_heads": 2},
                "'num_keY_value_heads'; did you mean 'num_key_value_heads'?",
            ),
            (
                "gemma3",
                {"text_config": {"hidden_sice": 8}},
                "x.text_config: unknown key 'hidden_sice'; did you mean",
            ),
            ("llama", {"zzz": 1}, "unknown key 'zzz'; known keys: "),
            (
                "llama",
                {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
                None,
            ),
            ("gemma3_text", {"sliding_window_pattern": 6}, None),
            ("qwen2", {"head_dim": 8, "max_window_layers": 2}, None),
            ("gpt2", {"n_head": 2, "num_attention_heads": 2, "num_labels": 3}, None),
        ],
    )
    def test_unknown_config_keys_are_refused(
        self, kind: str, options: dict[str, Any], message: str | None
    ) -> None:
        """transformers keeps a misspelt ``num_keY_value_heads`` as an attribute and uses the default."""
        config = AutoConfig.for_model(kind, **options)
        with (
            nullcontext() if message is None else pytest.raises(UserError, match=re.escape(message))
        ):
            check_keys(config, options, "x")

    @pytest.mark.parametrize("config", list(CONFIGS.values()), ids=CONFIGS)
    def test_published_configs_are_known(self, config: dict[str, Any]) -> None:
        check_keys(AutoConfig.for_model(**config), config, "x")

    def test_too_many_labels_are_refused(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """transformers builds a dictionary of all labels before it loads anything."""
        change_config(folder, lambda config: config.update(num_labels=10_000_000))
        assert "'num_labels' in its config is 1e+07; more than 10,000" in fails(
            capsys, "plan", "attention", "--model", folder
        )

    def test_tokens_of_another_model(self) -> None:
        check_tokens(tiny_model(), 96)
        with pytest.raises(UserError, match=r"token 97, but the model knows 97 \(0 to 96\) only"):
            check_tokens(tiny_model(), 97)

    @pytest.mark.parametrize(
        ("family", "options"),
        [
            ("llama", {}),
            ("gpt2", {}),
            ("gpt_bigcode", {}),
            ("biogpt", {}),
            ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
            ("gpt_neo", {"attention_types": [[["global", "local"], 2]]}),
            ("roberta", {"is_decoder": True, "pad_token_id": 1}),
            ("gptj", {"rotary_dim": 4}),
            ("codegen", {"rotary_dim": 4}),
            ("ctrl", {"dff": 48}),
        ],
    )
    def test_positions_are_as_many_as_a_model_reads(
        self, family: str, options: dict[str, Any]
    ) -> None:
        """A text longer than a table of positions was an IndexError, or an assertion on a GPU."""
        model = tiny_model(family, vocab_size=128, **options)
        positions = num_positions(model)
        if family == "llama":
            assert positions is None
            with pytest.warns(
                UserWarning,
                match="sequences of 129 tokens are longer than the model's max_position",
            ):
                check_length(model, 129, "give less")
            return
        assert positions == (126 if family == "roberta" else 128)
        tokens = torch.full((1, positions + 1), 5)
        with torch.no_grad():
            model(input_ids=tokens[:, 1:], use_cache=False)
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=tokens, use_cache=False)
        with pytest.raises(
            UserError, match=f"longer than the model's table of {positions} positions\ngive less"
        ):
            check_length(model, positions + 1, "give less")
        check_length(model, positions, "give less")


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "model")
    return tmp_path / "model"


class TestPasses:
    def options(self, folder: Path, text: Path, block_size: int) -> SubjectOptions:
        return SubjectOptions(
            model=str(folder), data=[str(text)], context=str(block_size), device="cpu"
        )

    @pytest.mark.filterwarnings("ignore:sequences of")  # the model has 128 positions
    def test_logits_that_do_not_fit(
        self,
        folder: Path,
        text: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": 1 << 29)
        monkeypatch.setattr("spkv_nas.model.model_shape._BEYOND", 10**6)
        size = ("--model", folder, "--data", text, "--device", "cpu", "--context")
        message = fails(capsys, "evaluate", *size, "1000000")
        assert (
            "hidden states and logits of 1 x 1000000 tokens: needs at least 756.14 MiB" in message
        )
        assert "give a smaller --context" in message

    @pytest.mark.parametrize("command", ["evaluate", "probe"])
    def test_blocks_far_beyond_the_models_positions(
        self,
        command: str,
        folder: Path,
        text: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        options = (
            "--data",
            text,
            "--device",
            "cpu",
            "--workspace",
            tmp_path / "w",
            "--context",
            "100000",
        )
        message = fails(capsys, command, "--model", folder, *options)
        assert (
            "sequences of 100000 tokens are more than 16 times as long as the model's max_position"
            in message
        )

    def test_a_batch_of_them(
        self, folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory, "available_bytes", lambda device="cpu": 1 << 19)
        monkeypatch.setattr(
            "spkv_nas.base.memory.available_bytes_per_process", lambda device: 1 << 40
        )
        subject = Subject.of(self.options(folder, text, 64), "", "measure")
        with pytest.raises(UserError, match=rf"logits of {micro_batch.BATCH_SIZE} x 64 tokens"):
            subject.load()
        subject.load(with_logits=False)

    def test_batch_size_fits_memory(
        self, folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The measured values do not depend on the batch size."""
        options = NLLOptions(model=str(folder), data=[str(text)], context="64", device="cpu")
        whole = nll(options).value.evaluation.nll
        sizes, messages, most = [], [], micro_batch.BATCH_SIZE
        for free in (1 << 40, 1_500_000, 1):
            monkeypatch.setattr(
                "spkv_nas.base.memory.available_bytes_per_process", lambda device, free=free: free
            )
            messages.clear()
            reporter = Recorder(announced=messages.append)
            measured = Subject.of(self.options(folder, text, 64), "", "measure").load(reporter)
            sizes.append(measured.batch_size)
            assert any("using a micro-batch of" in line for line in messages) == (
                measured.batch_size < most
            )
            assert nll(options).value.evaluation.nll.mean == pytest.approx(whole.mean, rel=1e-6)
        assert sizes[0] == most > sizes[1] > sizes[2] == 1

    def test_tokens_that_the_model_does_not_have(
        self, tmp_path: Path, text: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        save(tiny_model(vocab_size=50), tiny_tokenizer, tmp_path / "small")
        with pytest.raises(UserError, match="the tokenizer belongs to another model"):
            Subject.of(self.options(tmp_path / "small", text, 64), "", "measure").load()
