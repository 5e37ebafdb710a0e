"""Base class of the criteria of a verdict, each a class in one file, whose fields are its options (``base.entry``).

``--margin rank=2:most=100`` sets the option ``most`` of a criterion ``rank``. ``registry.py`` lists the built-in ones;
a package adds its own by an entry point (see "Extend spkv-nas" in the documentation). The command line imports all of
them, so a criterion imports torch inside its methods.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin

import numpy as np

from spkv_nas.base import entry, progress
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag
from spkv_nas.evaluation.verdict.loss_tests import PairedTest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from spkv_nas.data.blocks import TokenBlocks
    from spkv_nas.evaluation.verdict.rounds import Rounds


@dataclass(frozen=True)
class Setting:
    """Models and text that every candidate of a verdict is measured with.

    ``text`` has its documents in random order, on none of which a candidate was selected; None if no criterion reads
    text. ``identity`` is that of the dense model, "" for a model in memory; ``seed`` draws samples.
    """

    dense: PreTrainedModel
    known_tokenizer: PreTrainedTokenizerBase | None
    text: TokenBlocks | None
    seed: int = 0
    identity: str = ""
    reporter: progress.Reporter = progress.SILENT

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises ``UserError`` if it was not given."""
        if self.known_tokenizer is None:
            raise UserError("a criterion of the margin generates text, so it needs tokenizer, the model's tokenizer")
        return self.known_tokenizer

    @property
    def blocks(self) -> TokenBlocks:
        """Return the text, for a criterion that reads it."""
        assert self.text is not None
        return self.text

    @cached_property
    def text_hash(self) -> str:
        """Return the identity of the text: a hash of its tokens and their documents."""
        key = hashlib.sha256(str(self.blocks.tokens.shape).encode())
        for array in (self.blocks.tokens, self.blocks.document):
            key.update(np.ascontiguousarray(array).data)
        return key.hexdigest()


@dataclass(frozen=True)
class Criterion(entry.Entry, ABC):
    """Criterion by which candidates are compared with the dense model, by a paired ``test`` of samples.

    Subclasses are frozen dataclasses; values of their options are int, float, str, bool or a list of str, for which the
    option is repeated. The title is the heading of its card on the page; ``noun`` is what a sample is, in the plural;
    ``reads_text`` tells whether the samples are documents of the text (``--data``).
    """

    test: ClassVar[PairedTest]
    noun: ClassVar[str] = "documents"
    reads_text: ClassVar[bool] = True

    @abstractmethod
    def prepare(self, setting: Setting) -> Rounds:
        """Return the samples, in rounds. Raises ``UserError`` if there are none."""

    def check(self) -> None:  # most have nothing to check
        """Check the options before anything is loaded. Raises ``UserError``."""

    @classmethod
    def options_help(cls) -> str:
        """Return the name, the help and the default of each option; empty without options."""
        return " ".join(
            f"{name.replace('_', '-')}: {option.flag.help}"
            + ("" if option.default_text in ("None", "False") else f" Default: {option.default_text}.")
            for name, option in cls.options().items()
        )

    def with_words(self, words: Sequence[str]) -> Criterion:
        """Return this criterion with options such as "lengths=512,4k", a word for each item of a list."""
        # Collect the words of each option
        texts: dict[str, list[str]] = {}
        options = {name.replace("_", "-"): option for name, option in self.options().items()}
        for word in words:
            name, _, text = word.partition("=")
            if name not in options:
                known = f"has no option '{name}'; it has {', '.join(options)}" if options else "takes no options"
                raise UserError(f"--margin: criterion {self.name} {known}")
            texts.setdefault(name, []).append(text)
        # Parse the values
        values = {name: _value(name, options[name].type, options[name].flag, texts[name]) for name in texts}
        return replace(self, **{name.replace("-", "_"): value for name, value in values.items()})


def _value(name: str, kind: Any, flag: Flag, texts: list[str]) -> Any:
    """Return the value of an option from its words, of which the last counts unless it takes a list."""
    from pydantic import TypeAdapter, ValidationError

    takes_list = any(get_origin(each) is list for each in (kind, *get_args(kind)))
    try:
        value = TypeAdapter(kind).validate_python(texts if takes_list else texts[-1])
    except ValidationError as error:
        raise UserError(f"--margin: {name}={texts[-1]}: {error.errors()[0]['msg']}") from error
    if flag.low is not None and value < flag.low:
        raise UserError(f"--margin: {name}={value}: it must be at least {flag.low:,}")
    if flag.high is not None and value > flag.high:
        raise UserError(f"--margin: {name}={value}: it must be at most {flag.high:,}")
    return value
