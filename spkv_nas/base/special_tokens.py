"""Encode texts as text, find the special tokens that a tokenizer puts before one, and begin prompts with them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_text(
    texts: "str | list[str]", tokenizer: "PreTrainedTokenizerBase", **options: Any
) -> Any:
    """Return what a tokenizer makes of texts, by default without the special tokens around them.

    A special token that a text spells out is encoded as the text that it is: documents about tokenizers, HTML and logs
    contain "</s>" or "<|endoftext|>", which are no ends of documents there. ``options`` go to the tokenizer.
    """
    # Tokenizers of mistral-common never read special tokens from a text, and refuse the option that turns this off
    if not type(tokenizer).__module__.endswith("tokenization_mistral_common"):
        options["split_special_tokens"] = True
    options.setdefault("add_special_tokens", False)
    return tokenizer(texts, verbose=False, **options)


def tokens_before(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Return the special tokens that a tokenizer puts before a text by itself."""
    if not len(tokenizer("", verbose=False)["input_ids"]):
        return ()
    complete, plain = (
        list(tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"])
        for special in (True, False)
    )
    starts = range(len(complete) - len(plain) + 1)
    start = next((start for start in starts if complete[start : start + len(plain)] == plain), 0)
    return tuple(complete[:start])


def prompt_tokens(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> list[int]:
    """Return the tokens of a prompt: what the tokenizer puts before a text by itself, and the prompt.

    A prompt that begins with these tokens already, as chat templates write them, gets them once. What a tokenizer puts
    after a text is left out, because the model is to continue it.
    """
    opening = list(tokens_before(tokenizer))
    ids = list(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])
    return ids if opening and ids[: len(opening)] == opening else [*opening, *ids]
