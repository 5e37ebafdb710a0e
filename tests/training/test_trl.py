"""Test TRL's SFTTrainer on a hybrid: the loss of its first step is that of each example alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers import sharpen_attention, tiny_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.checkpoint import save
from spkv_nas.model.windows import apply_layout

SENTENCE = "fox jumps over two of the dogs that sleep in a house by the sea"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"packing": True, "max_length": 512}, {"padding_free": True, "max_length": None}],
    ids=["padded", "packed", "padding-free"],
)
@pytest.mark.parametrize("lora", [False, True])
def test_first_step(
    lora: bool, options: dict[str, Any], tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    model = sharpen_attention(
        tiny_model(vocab_size=len(tiny_tokenizer), max_position_embeddings=512), 4.0
    )
    apply_layout(model, Layout(("GL", "LG") * 2, 6, sinks=2))
    tiny_tokenizer.pad_token = tiny_tokenizer.eos_token
    words = SENTENCE.split()
    examples = [" ".join(words[start:] + words[: 3 * start]) for start in range(4)]
    config = trl.SFTConfig(
        tmp_path, max_steps=1, per_device_train_batch_size=4, logging_steps=1, report_to="none", use_cpu=True,
        bf16=False, save_strategy="no", **options,
    )  # fmt: skip
    adapters = {}
    if lora:
        peft = pytest.importorskip("peft")
        adapters = {
            "peft_config": peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        }
    dataset = Dataset.from_dict({"text": examples})
    trainer = trl.SFTTrainer(
        model, config, train_dataset=dataset, processing_class=tiny_tokenizer, **adapters
    )
    # Compute the loss of every example alone
    losses = []
    for ids in (
        trainer.train_dataset["input_ids"]
        if not options.get("packing")
        else _parts(trainer.train_dataset)
    ):
        tokens = torch.tensor([ids])
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
        losses.append(cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none"))
    expected = float(torch.cat(losses).mean())
    # Train a step
    trainer.train()
    found = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert float(found) == pytest.approx(expected, abs=1e-4)


def _parts(dataset: Dataset) -> list[list[int]]:
    """Return the examples in packed rows."""
    return [
        part.tolist()
        for row in dataset
        for part in torch.split(torch.tensor(row["input_ids"]), list(row["seq_lengths"]))
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_:FutureWarning"
)  # TRL calls what transformers renamed
def test_folders_of_hybrids(tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Trainers load them, also as the reference of a policy; a hybrid in memory has no reference without a word."""
    trl = pytest.importorskip("trl")
    tiny_tokenizer.pad_token = tiny_tokenizer.eos_token
    save(tiny_model(vocab_size=len(tiny_tokenizer)), tiny_tokenizer, tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    apply_layout(model, Layout(("GL", "LG") * 2, 6, sinks=2))
    save(model, tiny_tokenizer, folder := tmp_path / "hybrid")
    options = {
        "max_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
    }
    texts = Dataset.from_dict({"text": [SENTENCE] * 4})
    trainer = trl.SFTTrainer(
        str(folder), trl.SFTConfig(tmp_path / "sft", **options), train_dataset=texts
    )
    assert trainer.model.config.spkv == model.config.spkv
    pairs = Dataset.from_dict(
        {"prompt": ["fox"] * 4, "chosen": [" jumps"] * 4, "rejected": [" sleeps"] * 4}
    )
    preferences = {"train_dataset": pairs, "processing_class": tiny_tokenizer}
    config = trl.DPOConfig(tmp_path / "dpo", **options)
    trainer = trl.DPOTrainer(str(folder), args=config, **preferences)
    trainer.train()
    assert trainer.ref_model.config.spkv == trainer.model.config.spkv == model.config.spkv
    with pytest.raises(
        OSError, match=r"changed by spkv_nas in memory: save it with spkv_nas\.save"
    ):
        trl.DPOTrainer(model, args=config, **preferences)
