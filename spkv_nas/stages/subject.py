"""Load the model to measure and the text to measure it on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spkv_nas.artifacts import defaults, selection
from spkv_nas.base import errors, names
from spkv_nas.base.assets import EMBEDDED, EMBEDDED_PREFIX
from spkv_nas.base.device import AUTO, dtype_name, measuring_device
from spkv_nas.base.distributed import after_main, connect, on_main
from spkv_nas.base.progress import LOGGER, SILENT, Reporter
from spkv_nas.data import block_files, chats, config, readers, sources, splits
from spkv_nas.data.context import FAR_SHARE
from spkv_nas.evaluation.micro_batch import (
    BATCH_SIZE,
    check_positions,
    fitting_batch,
    require_logits,
)
from spkv_nas.model.source import check_checkpoint, resolve
from spkv_nas.stages.options import REFERENCE, DocumentOptions, InDtype, SubjectOptions
from spkv_nas.stages.sized_model import model_name, result_name
from spkv_nas.training.recipe import Recipe

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from spkv_nas.data.blocks import TokenBlocks
    from spkv_nas.evaluation import paired, separators

Loaded = tuple["PreTrainedModel", "PreTrainedTokenizerBase"]


@dataclass(frozen=True)
class Measured:
    """Loaded model with the blocks of text to measure it on."""

    model: PreTrainedModel  # on its device
    tokenizer: PreTrainedTokenizerBase
    blocks: TokenBlocks  # to measure on
    whole: TokenBlocks  # all that were read, including those not measured on
    text: Any  # record of where the blocks come from
    saved_dtype: str  # of the checkpoint
    separator: separators.SeparatorReport  # what stands after a document, and how it was chosen
    # Of other documents, for gates to learn on; None unless gates are to be learned
    train: TokenBlocks | None = None
    batch_size: int = BATCH_SIZE  # micro-batch size in blocks

    @property
    def dtypes(self) -> dict[str, str]:
        """Return the dtypes to record with a result: of the checkpoint and of the computation."""
        return {"dtype": self.saved_dtype, "computed_in": dtype_name(self.model.dtype)}


@dataclass(frozen=True)
class NLLTable:
    """Result of a command that measures variants of a model on one text, such as layouts or pruned caches."""

    name: str  # of the results
    rows: pd.DataFrame  # the table, one row per variant
    folder: Path  # of the table
    num_documents: int  # measured on
    # Number of equally long documents that would give the same standard error
    effective_documents: float
    # What selected a layout on some of these documents, such as "probe mine"
    selected_by: tuple[str, ...] = ()
    num_selection: int = 0  # number of these documents
    alarm: str | None = None  # sentence if the scores make no sense (``evaluation.alarms``)


@dataclass(frozen=True)
class Subject:
    """Checkpoint to measure, with the user's text or a recipe's held-out text."""

    source: str  # model folder, Hub id or "embedded:NAME"
    # Name of the model's layouts and other results: its recipe's, the embedded models', or its folder's
    family: str
    # Of the results: ``family``, or one distinct from the demo's for an embedded model on custom text
    name: str
    recipe: Recipe  # its held-out text is used without ``data``
    base: Path  # folder of the recipe's relative paths
    options: SubjectOptions  # text, block size and device
    # Of the user or a probe, after a document; None or "auto": to be measured
    given_separator: str | None = None
    # Whether tokens see other documents of their block: "joined" or "separate"; None: as a recipe says, and the user's
    # own text separately, as documents reach a model, where the model can keep them apart
    documents: str | None = None
    # Tokens to read of the user's text, spread over its documents; None: ``max_tokens`` of the options
    read_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the name before hours of work."""
        names.check_name(self.name, "the name")

    @classmethod
    def of(
        cls, options: SubjectOptions, default: str, purpose: str, *, reads_text: bool = True
    ) -> Subject:
        """Make the subject of options, or the ``default`` model; ``UserError`` if a text to ``purpose`` is missing."""
        source = options.model or default
        is_embedded = source.startswith(EMBEDDED_PREFIX)
        if reads_text and not is_embedded and not options.data:
            raise errors.UserError(
                f"--model needs --data: files or folders with the text to {purpose}"
            )
        family = model_name(source)
        name = family
        if is_embedded and options.data:
            name = source.replace(":", "-")
        return cls(
            source=source,
            family=family,
            name=options.name or name,
            recipe=Recipe.read(EMBEDDED / "recipe.yaml"),
            base=EMBEDDED,
            options=options,
            documents=options.documents if isinstance(options, DocumentOptions) else config.JOINED,
        )

    @classmethod
    def of_recipe(cls, options: SubjectOptions, file: Path, checkpoint: Path) -> Subject:
        """Make the subject of a recipe's checkpoint on the recipe's held-out text."""
        recipe = Recipe.read(file)
        return cls(
            source=str(checkpoint),
            family=recipe.name,
            name=options.name or recipe.name,
            recipe=recipe,
            base=file.parent,
            options=options,
            documents=options.documents if isinstance(options, DocumentOptions) else None,
        )

    @classmethod
    def evaluated(cls, options: SubjectOptions) -> Subject:
        """Make the subject of an evaluation; results take the name of ``result_name``."""
        subject = cls.of(options, REFERENCE, "evaluate on")
        if options.name is not None or subject.source.startswith(EMBEDDED_PREFIX):
            return subject
        return replace(subject, name=result_name(subject.source, options.folders))

    def check(self, *, in_blocks: bool = True) -> None:
        """Check without torch that model and text exist, and if ``in_blocks`` that ``max_tokens`` covers a block."""
        check_checkpoint(self.source)
        for source in self.options.data or ():
            self._check_source(source)
        options = self.options
        context = options.block_size  # raises if it is malformed
        length = context if options.data else self.recipe.data.block_size
        if not in_blocks or options.max_tokens is None or length is None:
            return
        if options.max_tokens < length:
            raise errors.UserError(
                f"--max-tokens {options.max_tokens} is less than one block of {length} tokens"
            )

    def _check_source(self, source: str) -> None:
        """Check that a source of text exists, and that the model has a template for its chats, if it has any."""
        has_chats = readers.check_source(source, Path())
        folder = resolve(self.source)
        if has_chats and folder.is_dir() and not chats.may_have_template(folder):
            raise errors.UserError(chats.no_template(source))

    @cached_property
    def length(self) -> int:
        """Return the tokens per sequence, in which losses are measured and memory is counted (``read_length``)."""
        options = self.options
        if not options.data:
            return self.recipe.data.block_size
        return options.block_size or read_length(
            self.source, tuple(options.data), options.max_tokens
        )

    def reading(self, tokens: int | None) -> Subject:
        """Return the subject that reads of the user's text ``tokens`` and those that select layouts; None: itself."""
        if tokens is None:
            return self
        from spkv_nas.probing.measure import selection_tokens

        return replace(self, read_tokens=tokens + selection_tokens(self.length))

    def load(
        self,
        reporter: Reporter = SILENT,
        *,
        with_logits: bool = True,
        tokens: int | None = None,
        learns: bool = False,
    ) -> Measured:
        """Load the model and the blocks; joins torchrun's processes and must be called on all ranks.

        Args:
            reporter: receives messages and progress.
            with_logits: whether the pass that follows computes logits of a whole micro-batch, which must fit in memory.
            tokens: number to use, spread over the text, where ``max_tokens`` is None; None: all.
            learns: whether a model without gates will learn them, so that its text is split by document.
        """
        from spkv_nas.evaluation.alarms import packing_warning
        from spkv_nas.model import config_section, model_shape

        # Load the model
        options = self.options
        length = self.length
        model, tokenizer, saved_dtype = self._load_model(reporter)
        check_positions(model, length, "--context")
        if with_logits:
            require_logits(model, 1, length)  # before the text is tokenised, which may take long
        # Read the text
        if options.data and options.block_size is None:
            reporter.announce(self._about_length())
        separator = self.separator(model, tokenizer, reporter)
        learns = learns and config_section.gate_config(model) is None
        train, whole = self.read(tokenizer, separator, reporter, learns=learns)
        # Choose the blocks to measure on
        blocks = self._part_to_measure(whole, tokens)
        for part in (blocks, train):
            if part is not None:
                model_shape.check_tokens(model, part.largest_token)
        # Fit the micro-batch to memory
        batch_size = fitting_batch(model, blocks, reporter)
        if with_logits:
            require_logits(model, batch_size, length)
        reporter.caution(packing_warning(separator, blocks))
        if options.data:
            tell_own_context(blocks, reporter)
        count = f"{blocks.num_blocks} blocks of {length} tokens"
        device = measuring_device(options.device)
        reporter.detail(f"{type(model).__name__}, {model.dtype}, on {device}; {count}")
        return Measured(
            model=model,
            tokenizer=tokenizer,
            blocks=blocks,
            whole=whole,
            text=options.data or self.recipe.data.model_dump(mode="json"),
            saved_dtype=saved_dtype,
            separator=separator,
            train=train,
            batch_size=batch_size,
        )

    def _part_to_measure(self, whole: TokenBlocks, tokens: int | None) -> TokenBlocks:
        """Return ``max_tokens`` of the text, else ``tokens``, spread over it; all of it without either."""
        if self.options.max_tokens is not None:
            return whole.spread(self.options.max_tokens // self.length)
        if tokens is not None:
            return whole.spread(max(1, tokens // self.length))
        return whole

    def _load_model(
        self, reporter: Reporter
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
        """Load the model, and return it with its tokenizer and the dtype of its checkpoint."""
        from spkv_nas.model import checkpoint

        options = self.options
        reporter.announce(f"loading {self.source}")
        device = measuring_device(options.device)
        connect(device)
        checkpoint_dtype = checkpoint.saved_dtype(self.source)
        model, tokenizer = checkpoint.load_on(
            self.source, device, options.dtype, spreads=options.device == AUTO
        )
        saved_name = dtype_name(checkpoint_dtype or model.dtype)
        compute_name = dtype_name(model.dtype)
        if saved_name != compute_name and options.dtype is None:
            reporter.announce(
                f"computing in {compute_name}: this device only emulates {saved_name}"
            )
        return model, tokenizer, saved_name

    def separator(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, reporter: Reporter
    ) -> separators.SeparatorReport:
        """Return what stands after a document, and whether documents of a block see each other.

        The separator is the one given, the recipe's, or what the model knows best; what was measured is kept for all
        commands on this model in this workspace. Must be called on all ranks.
        """
        report = self._separator(model, tokenizer, reporter)
        return replace(report, documents=self._documents(model, reporter))

    def _documents(self, model: PreTrainedModel, reporter: Reporter) -> str:
        """Return "joined" or "separate": as given, as the recipe says, or separate where the model allows it."""
        from spkv_nas.model.cache_layers import mixes_documents

        if self.documents is not None:
            return self.documents
        if not self.options.data:
            return self.recipe.data.documents
        if mixes_documents(model):
            reporter.announce(
                "documents share blocks and see each other, "
                f"because {type(model).__name__} cannot keep them apart"
            )
            return config.JOINED
        return config.SEPARATE

    def _separator(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, reporter: Reporter
    ) -> separators.SeparatorReport:
        """Return what stands after a document, of documents that see each other."""
        from spkv_nas.evaluation.separators import (
            SEPARATORS,
            SeparatorReport,
            measure_separator,
            shared_separator,
        )
        from spkv_nas.model.checkpoint import checkpoint_hash
        from spkv_nas.training.corpus import recipe_separator

        options = self.options
        given = self.given_separator
        if given is not None and given != config.AUTO:
            return SeparatorReport(given)
        if not options.data:
            runs = options.folders.run_dir(self.recipe.name)
            return on_main(
                lambda: recipe_separator(self.recipe, tokenizer, self.base, runs, reporter)
            )

        def measure() -> SeparatorReport:
            # Of a text that repeats itself all is read
            with reporter.bar("choosing the separator of documents", "kB") as progress:
                documents = sources.documents(options.data or (), Path(), progress=progress)
                return measure_separator(model, tokenizer, documents, self.length)

        file = options.folders.run_dir(self.family) / SEPARATORS
        return on_main(
            lambda: shared_separator(file, checkpoint_hash(self.source), measure, reporter)
        )

    def read(
        self,
        tokenizer: PreTrainedTokenizerBase,
        separator: separators.SeparatorReport,
        reporter: Reporter = SILENT,
        *,
        learns: bool = False,
    ) -> tuple[TokenBlocks | None, TokenBlocks]:
        """Read the text without loading the model; must be called on all ranks.

        ``separator`` says what stands after a document, and whether documents see each other. Returns (blocks that
        gates learn on, None unless ``learns``; all other blocks). Raises ``UserError`` if the text is missing or too
        short.
        """
        options = self.options
        length = self.length
        if learns:
            return self._split(tokenizer, length, separator, reporter)
        if not options.data:
            max_blocks = options.max_tokens and options.max_tokens // length
            return None, self._held_out(tokenizer, max_blocks, separator, reporter)
        read = partial(
            splits.load_text,
            options.data,
            tokenizer,
            options.folders.run_dir(self.name) / "blocks",
            Path(),
            block_size=length,
            separator=separator.best,
            documents=separator.documents,
            max_tokens=options.max_tokens if self.read_tokens is None else self.read_tokens,
            reporter=reporter,
        )
        return None, after_main(read)

    def _held_out(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_blocks: int | None,
        separator: separators.SeparatorReport,
        reporter: Reporter,
    ) -> TokenBlocks:
        """Load held-out text, mixed with RULER samples as training text is, then in at most ``max_blocks`` blocks."""
        from spkv_nas.training import corpus

        recipe = self.recipe
        cache = self.options.folders.run_dir(recipe.name) / "blocks"
        data = self._read_as(recipe.data, separator)
        load = partial(
            splits.load_heldout,
            data,
            tokenizer,
            cache,
            self.base,
            reporter,
            stretch=recipe.heldout_stretch,
        )
        text = after_main(load)
        if recipe.data.mix is None:
            return text
        total = min(text.num_blocks, max_blocks or text.num_blocks)
        essays = corpus.read_essays(recipe, self.base)
        return corpus.mixed_heldout(recipe, tokenizer, essays, text, total)

    def _split(
        self,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        separator: separators.SeparatorReport,
        reporter: Reporter,
    ) -> tuple[TokenBlocks, TokenBlocks]:
        """Split the user's text, else the recipe's, by document into (training, held-out) blocks."""
        data = self.recipe.data
        base = self.base
        name = self.recipe.name
        stretch = self.recipe.heldout_stretch
        if self.options.data:
            data = config.DataConfig(sources=[*self.options.data], block_size=length)
            base = Path()
            name = self.name
            stretch = length
        data = self._read_as(data, separator)
        cache = self.options.folders.run_dir(name) / "blocks"
        folder = on_main(
            partial(splits.cache_split, data, tokenizer, cache, base, reporter, stretch=stretch)
        )
        return splits.read_split(folder, data, stretch=stretch)

    def _read_as(
        self, data: config.DataConfig, separator: separators.SeparatorReport
    ) -> config.DataConfig:
        """Return the description of a text that is read with a separator."""
        changes = {"separator": separator.best, "documents": separator.documents}
        return data.model_copy(update=changes)

    def _about_length(self) -> str:
        """Return a sentence on the length that was chosen, and why."""
        most = default_context(self.source)
        if self.length == most:
            why = f"the model's context, up to {defaults.CONTEXT:,}"
        else:
            why = f"too few of its documents are longer, and {most:,} would be read by default"
        return f"text in sequences of {self.length:,} tokens: {why} (--context)"


def sequence_length(options: SubjectOptions) -> int:
    """Return the tokens per sequence in which a model is measured, for which memory is counted, too.

    Without text, where a criterion makes its own samples, it is the context that is given, or ``default_context``.
    """
    if options.data:
        return Subject.of(options, REFERENCE, "measure on").length
    return options.block_size or default_context(options.model or REFERENCE)


def default_context(source: str) -> int:
    """Return the tokens per sequence for a model if the text has enough: its context, up to ``CONTEXT``."""
    from spkv_nas.model.checkpoint import read_size

    return min(defaults.CONTEXT, read_size(source).positions or defaults.CONTEXT)


@cache
def read_length(source: str, data: tuple[str, ...], max_tokens: int | None) -> int:
    """Return the tokens per sequence of a user's text: ``default_context``, or less if its documents are shorter.

    It is read once per process. Raises ``UserError`` if the text or the tokenizer cannot be read.
    """
    from spkv_nas.data.context import supported_context
    from spkv_nas.model.checkpoint import load_tokenizer

    LOGGER.info("choosing the length of sequences")
    longest = min(default_context(source), max_tokens or defaults.CONTEXT)
    return supported_context(sources.documents(data, Path()), load_tokenizer(source), longest)


def tell_own_context(blocks: TokenBlocks, reporter: Reporter) -> None:
    """Say how much of a text is evidence on distant tokens, and warn if that is too little to tell local heads apart.

    ``reporter`` is told the share of predicted tokens that have half a sequence or more of their own document before
    them, which is what a window of that many keys can hide.
    """
    half = blocks.block_size // 2
    before = blocks.own_context
    share = 0.0
    median = 0
    if before.size:
        share = float((before >= half).mean())
        median = int(np.median(before))
    sentence = (
        f"{100 * share:.0f} % of the tokens have {half:,} or "
        "more of their own document before them, the median "
        f"{median:,}"
    )
    if share >= FAR_SHARE:
        reporter.announce(sentence)
    else:
        reporter.caution(
            f"warning: only {sentence}: "
            "the text tells little about what heads read at that distance; use longer "
            "documents, or a shorter --context"
        )


def check_pair(model: str, against: str | None) -> None:
    """Raise ``UserError`` if two checkpoints differ in their tokenizer, before anything large is read."""
    from spkv_nas.model.checkpoint import load_tokenizer

    if against is None:
        return
    fingerprint = block_files.fingerprint(load_tokenizer(model))
    if block_files.fingerprint(load_tokenizer(against)) != fingerprint:
        raise errors.UserError(
            f"--against {against} has a different tokenizer: "
            "results are comparable only on the same tokens"
        )


def load(options: InDtype, source: str, reporter: Reporter) -> Loaded:
    """Load a checkpoint and its tokenizer; joins torchrun's processes and must be called on all ranks."""
    from spkv_nas.model import checkpoint, model_shape

    reporter.announce(f"loading {source}")
    device = measuring_device(options.device)
    connect(device)
    model, tokenizer = checkpoint.load_on(
        source, device, options.dtype, spreads=options.device == AUTO
    )
    model_shape.check_tokens(model, max(tokenizer.get_vocab().values()))
    return model, tokenizer


def measured_on(
    subject: Subject, measured: Measured, nll: paired.DocumentNLL, **more: Any
) -> dict[str, object]:
    """Return the record of what a table was measured on, for the file beside it."""
    from spkv_nas.model.checkpoint import model_origin

    return {
        **model_origin(subject.source),
        "data": measured.text,
        **measured.dtypes,
        "separator": measured.separator.as_mapping(),
        "block_size": measured.blocks.block_size,
        selection.SELECTION: selection.digest(measured.blocks.text_ids),
        "num_tokens": int(nll.num_tokens.sum()),
        "num_documents": nll.num_documents,
        "effective_documents": round(nll.effective_documents, 1),
        **more,
    }
