"""Write a random model and text sampled from it: text that the model knows, so that ``auto`` finds a passing layout."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from spkv_nas.model.checkpoint import save

NUM_WORDS = 97  # of the vocabulary


def write_model(folder: Path, size: int, number: int = 200, decisive: float = 20.0) -> list[str]:
    """Write a random model with large attention outputs to ``folder``; return ``number`` documents it wrote.

    Documents have ``size`` tokens. Every head that becomes local raises the NLL. ``decisive`` scales the logits: at 20
    the NLL is .65 of that of token frequencies, and above .7 on some samples of a few documents, which is an alarm.
    """
    # Make attention matter, and predictions decisive
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(4.0)
            layer.self_attn.v_proj.weight.mul_(4.0)
            layer.self_attn.o_proj.weight.mul_(4.0)
        model.get_output_embeddings().weight.mul_(decisive)
    # Give every token a word
    words = Tokenizer(
        WordLevel({f"w{number}": number for number in range(NUM_WORDS)}, unk_token="w0")
    )
    words.pre_tokenizer = WhitespaceSplit()
    save(model, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0"), folder)
    # Sample the documents
    torch.manual_seed(0)
    first = torch.randint(3, NUM_WORDS, (number, 1))
    length = {
        "max_new_tokens": size - 1,
        "min_new_tokens": size - 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    documents = model.generate(first, do_sample=True, **length)
    return [" ".join(f"w{token}" for token in tokens) for tokens in documents.tolist()]
