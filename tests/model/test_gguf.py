"""Check that a GGUF file is a model: equal weights, tokens and results, converted once, and clear errors."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_model
from transformers import LlamaForCausalLM

import spkv_nas
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.model import gguf as gguf_files
from spkv_nas.model.source import resolve

gguf = pytest.importorskip("gguf")
WORDS = ["<s>", "</s>", *(chr(code) for code in range(33, 127)), "Ġ", "th", "the", "Ġthe"]
MERGES = ["t h", "th e", "Ġ the"]


def interleaved(weight: torch.Tensor, heads: int) -> np.ndarray:
    """Return a projection of queries or keys with the rows of each head in the order of llama.cpp's rotation."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns)
        .swapaxes(1, 2)
        .reshape(rows, columns)
        .numpy()
    )


def write_gguf(model: LlamaForCausalLM, file: Path) -> None:
    """Write a tiny Llama in float32, as llama.cpp's converter lays it out, with a byte-level BPE."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    words = WORDS + [f"<unused{number}>" for number in range(config.vocab_size - len(WORDS))]
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *([1] * (len(words) - 2))])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    # Tensors under llama.cpp's names
    names = {
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = {name: value.detach().float() for name, value in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    if not config.tie_word_embeddings:
        writer.add_tensor("output.weight", state["lm_head.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name, short in names.items():
            writer.add_tensor(
                f"blk.{layer}.{short}.weight", state[f"{prefix}{name}.weight"].numpy()
            )
        query = interleaved(state[f"{prefix}self_attn.q_proj.weight"], config.num_attention_heads)
        key = interleaved(state[f"{prefix}self_attn.k_proj.weight"], config.num_key_value_heads)
        writer.add_tensor(f"blk.{layer}.attn_q.weight", query)
        writer.add_tensor(f"blk.{layer}.attn_k.weight", key)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def test_it_is_the_model_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(vocab_size=128).half().float()  # numbers that float16 holds
    file = tmp_path / "Tiny-F32.gguf"
    write_gguf(model, file)
    with caplog.at_level(logging.INFO, "spkv_nas"):
        loaded, tokenizer = spkv_nas.load(file)
        spkv_nas.load(file)
    assert caplog.messages.count("converting Tiny-F32.gguf, once for all commands") == 1
    assert loaded.dtype == torch.float16
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].float(), weight), name
    assert (
        tokenizer.decode(tokenizer("the the", add_special_tokens=False)["input_ids"]) == "the the"
    )
    # Converted once
    monkeypatch.setattr(gguf_files, "_convert", lambda *_: pytest.fail("converted again"))
    folder = resolve(str(file))
    assert folder.is_relative_to(tmp_path / "caches")
    assert folder.name.startswith("Tiny-F32-")


def test_a_command_that_converts_a_file_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options are checked, and with them the file is converted, before the command starts."""
    file = tmp_path / "Tiny-F32.gguf"
    write_gguf(tiny_model(vocab_size=128).float(), file)
    main(["plan", "attention", "--model", str(file)])
    assert capsys.readouterr().err.startswith("converting Tiny-F32.gguf, once for all commands\n")


@pytest.mark.parametrize("content", [None, b"", b"GGUF" + bytes(40), b"no GGUF file" * 20])
def test_what_is_no_model_is_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "damaged.gguf"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot load model .*damaged\.gguf"):
        spkv_nas.load(file)
    assert not [folder for folder in (tmp_path / "caches").rglob("damaged-*") if folder.is_dir()]
