"""Chats: lists of messages with a role and a content, which a model's own chat template turns into tokens.

A chat is stored as JSON until its tokens are needed, as documents are read without a model.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spkv_nas.base import errors, files
from spkv_nas.base.arrays import Tokens

_ROLE = "role"
_CONTENT = "content"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_CONFIG = "tokenizer_config.json"


def as_json(value: Any) -> str | None:
    """Return the JSON of a list of messages, or of a mapping that holds one as "messages"; None for anything else.

    Entries without a value, which tables fill in, are left out. A chat without a message is the empty text.
    """
    messages = value.get("messages") if isinstance(value, Mapping) else value
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return None
    kept = []
    for message in messages:
        if not isinstance(message, Mapping) or not message.keys() >= {_ROLE, _CONTENT}:
            return None
        kept.append({key: entry for key, entry in message.items() if entry is not None})
    return json.dumps(kept, ensure_ascii=False, default=str) if kept else ""


def encode(chat: str, name: str, tokenizer: Any, opening: tuple[int, ...]) -> Tokens:
    """Return the tokens, int32 [tokens], of a chat's JSON by the tokenizer's chat template, without ``opening``.

    A special token that a message spells is text, as in other documents, where transformers knows how to keep it apart
    from the template's own. Raises ``UserError``, which names the document: there is no template, or it refuses the
    chat.
    """
    ids = np.array(template_tokens(json.loads(chat), name, tokenizer), dtype=np.int32)
    beginning = tuple(ids[: len(opening)].tolist())
    return ids[len(opening) :] if beginning == opening else ids


def template_tokens(
    messages: Sequence[Mapping[str, Any]], name: str, tokenizer: Any, **options: Any
) -> list[int]:
    """Return the tokens of messages by the tokenizer's chat template, with ``options`` of ``apply_chat_template``.

    Raises ``UserError`` as ``encode``.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise errors.UserError(no_template(name))
    try:
        encoded = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, sanitize_control_tokens=True, **options
        )
    except Exception as error:  # of jinja2, or of what a template does
        raise errors.UserError(
            f"{name}: the model's chat template refuses it: {errors.first_line(error)}"
        ) from error
    return list(encoded["input_ids"])


def no_template(name: str) -> str:
    """Return the message for a chat, which ``name`` holds, where the model has no chat template."""
    return (
        f"{name} holds chats, and the model's tokenizer has no chat template: "
        "give texts, or a model tuned on chats"
    )


def may_have_template(folder: Path) -> bool:
    """Return whether the files of a model's folder hold a chat template."""
    if any((folder / name).exists() for name in TEMPLATE_FILES):
        return True
    file = folder / _CONFIG
    if not files.is_file(file):
        return False
    return bool(files.read_json(file, "tokenizer config").get("chat_template"))
