"""Export a checkpoint with a layout applied, in the form of an export target, with a model card.

A layout changes the config but no weight, so most targets carry the weight files over unchanged (``weight_files.py``).
"""

import os
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load
from yaml import YAMLError

from spkv_nas.artifacts import local_layers, result_tables, selection
from spkv_nas.artifacts.layout import FILE, Layout
from spkv_nas.base import assets, device, errors, files, manifest, replace, units, version
from spkv_nas.cost.cache_cost import CacheCost
from spkv_nas.engines.forms import REFUSED
from spkv_nas.engines.registry import ENGINES, objection, outcomes, serve_command
from spkv_nas.model import config_section, custom_model_type, model_shape, source, windows
from spkv_nas.model.checkpoint import checkpoint_hash, load, weight_files
from spkv_nas.model.export import registry
from spkv_nas.model.export.target import ExportTarget, Hybrid, TargetError

_REMEDY = f"export to '{registry.AUTO}', which takes a form that can express every layout"
_CARD_FILE = "README.md"
_CONTEXTS = (8_192, 32_768, 131_072)  # tokens whose memory the card lists
_LICENCE = ("license", "license_name", "license_link")  # keys that the base model's card may have
_TAGS = ["hybrid-attention", "sliding-window-attention", "spkv-nas"]
_NOT_MEASURED = (
    (
        "Not measured for this card. `spkv-nas verdict DIR --against BASE_MODEL --data TEXT` "
        "measures what it loses against full attention."
    ),
)
_CARD = """\
---
{metadata}
---

# {title}

{name} with hybrid attention: {layout.num_global} of {layout.num_heads} KV heads attend to the whole sequence, the \
others to recent tokens ({layout.legend_words}). Made with spkv-nas {version}.

## Layout

```text
{layout.description}
{rows}
```

Each line is a layer, with its number, a letter per KV head, and the number of its global heads.

- `G`: global head, sees all tokens so far
{legend}

`layout.yaml` holds the same: spkv-nas reads it from this folder, and as `hub:ORG/NAME` once the folder is on the Hub.

## Memory

Keys and values of one sequence in {dtype}, by formula; an engine may round up, or keep more.

| tokens | full attention | this layout | share |
| ---: | ---: | ---: | ---: |
{memory}

## Evaluation

{evaluation}

## Use

`DIR` is this folder, or its name on the Hub.

{usage}

Inference engines, by the support matrix of spkv-nas:

{engines}

## Not tested

- Inference engines on this folder; `spkv-nas serve-check DIR --engine ENGINE` runs one.
- What the evaluation above does not list, such as answers to prompts, longer sequences, and other text.
"""


@dataclass(frozen=True)
class CardFacts:
    """Hold what a card says besides the model and its layout."""

    title: str  # name of the model
    checkpoint: files.StrPath  # folder or id that is exported
    evidence: Sequence[str]  # sentences on what was measured; empty: nothing


def write_card(
    folder: Path,
    hybrid: Hybrid,
    facts: CardFacts,
    *,
    form: str,
    verified: str | None,
    engines: Mapping[str, str],
) -> None:
    """Write the card of a folder to which a hybrid was exported.

    ``form`` says what it is and what loads it, ``verified`` what was compared, if anything, and ``engines`` what each
    does with it, by name and version.
    """
    layout = hybrid.layout
    dtype = device.dtype_name(hybrid.model.dtype)
    if dtype not in units.ITEM_BYTES:
        dtype = "float32"
    metadata, name = _base_model(facts.checkpoint)
    head = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=_TAGS, **metadata
    )
    rows = [f"{layer:>4}  {row}  {row.count('G')}" for layer, row in enumerate(layout.heads)]
    evidence = [_plain(sentence) for sentence in facts.evidence or _NOT_MEASURED]
    if verified is not None:
        evidence.append(f"When it was exported, {verified}.")
    form_sentence = f"{form[:1].upper()}{form[1:]}."
    usage = [form_sentence, *_usage(folder, engines, is_verified=verified is not None)]
    text = _CARD.format(
        metadata=head,
        title=_plain(facts.title),
        name=name,
        layout=layout,
        version=version.__version__,
        rows="\n".join(rows),
        legend=_bullets(_local_heads(layout)),
        dtype=dtype,
        memory="\n".join(_memory(hybrid, dtype)),
        evaluation=_bullets(evidence),
        usage="\n".join(usage),
        engines=_bullets(f"{engine}: {outcome}" for engine, outcome in engines.items()),
    )
    files.write_atomic(folder / _CARD_FILE, text)


def _local_heads(layout: Layout) -> Iterable[str]:
    """Yield what the letter of each kind of local heads means."""
    sinks = ""
    if layout.sinks == 1:
        sinks = ", and the first token"
    elif layout.sinks:
        sinks = f", and the first {layout.sinks:,} tokens"
    for letter, window in layout.legend.items():
        yield f"`{letter}`: local head, sees the last {window:,} tokens, its own included{sinks}"


def _plain(text: str) -> str:
    """Return a text with names of a user's files as one line of Markdown without HTML."""
    return errors.printable(text.replace("\n", " ")).replace("<", "&lt;")


def _base_model(checkpoint: files.StrPath) -> tuple[dict[str, Any], str]:
    """Return the licence and the base model for the metadata, and the name of the checkpoint with a link to that model.

    The base model is the checkpoint if that is on the Hub, else the one that its card or its config names, if any.
    """
    path = source.resolve(checkpoint)
    folder = source.model_folder(str(path))
    # Go on from a run's checkpoint to the model that it was trained from
    record = folder / result_tables.RUN_RECORD
    if files.is_file(record):
        recipe = files.read_json(record, "run record").get("recipe", {})
        trained_from = recipe.get("model", {}).get("path")
        with suppress(OSError, errors.UserError):  # it may be on another machine
            metadata, name = _base_model(str(trained_from))
            return metadata, f"{name}, retrained,"
    # Read the card of the checkpoint, which people write
    card: dict[str, object] = {}
    with suppress(OSError, ValueError, YAMLError):
        card = metadata_load(folder / _CARD_FILE) or {}
    metadata = {key: card[key] for key in _LICENCE if key in card}
    # Find the base model
    base: str | None = source.split_revision(str(checkpoint))[0]
    if path.exists():
        base = _recorded_base(folder, card)
    # Name the checkpoint without the folders of this machine
    shown = str(checkpoint)
    if not shown.startswith(assets.EMBEDDED_PREFIX):
        shown = path.absolute().name
    name = f"`{_plain(shown).replace('`', chr(39))}`"
    if base is None:
        return metadata, name
    metadata["base_model"] = base
    link = f"[{base}](https://huggingface.co/{base})"
    return metadata, f"{name} (base model {link})" if path.exists() else link


def _recorded_base(folder: Path, card: Mapping[str, Any]) -> str | None:
    """Return the model on the Hub that the card of a model folder, or else its config, names as its base; or None."""
    stated = card.get("base_model")  # by people: any text, or a list
    named = stated if isinstance(stated, list) else [stated]
    saved = files.read_json(folder / "config.json", "config").get("_name_or_path")
    for name in map(str, (*named, saved)):
        if source.is_on_hub(name):
            return name
    return None


def _memory(hybrid: Hybrid, dtype: str) -> Iterable[str]:
    """Yield the rows on the KV cache at several numbers of tokens, and which are beyond the model's positions."""
    layout = hybrid.layout
    size = model_shape.model_size(hybrid.model)
    layers = local_layers.config_layers(size.native_windows or [None] * layout.num_layers)
    facts = local_layers.cache_facts(layers, size.heads.heads_per_layer, size.heads.head_dims)
    # List the model's own context, too, if it is shorter than all of them
    most = size.positions or _CONTEXTS[-1]
    contexts = (most, *_CONTEXTS) if most < _CONTEXTS[0] else _CONTEXTS
    for context in contexts:
        cost = CacheCost(context, 1, layout.window, dtype=dtype, sinks=layout.sinks, **facts)
        used = cost.layout_bytes(layout, local_layers.candidate_layers(layers))
        full = cost.full(layout.num_heads)
        mark = " *" if context > most else ""
        sizes = f"{units.format_bytes(full)} | {units.format_bytes(used)}"
        yield f"| {context:,}{mark} | {sizes} | {100 * used / full:.1f} % |"
    if most < _CONTEXTS[-1]:
        yield (
            "\n"
            f"\\* more than the {most:,} tokens that the model was made for "
            "(`max_position_embeddings`)"
        )


def _usage(folder: Path, engines: Mapping[str, str], *, is_verified: bool) -> Iterable[str]:
    """Yield how to load and serve a folder of the custom model type, or one that plain transformers was verified on."""
    file = folder / "config.json"
    config = files.read_json(file, "config") if file.is_file() else {}
    is_custom = config.get("model_type") == custom_model_type.CUSTOM_MODEL_TYPE
    has_code = "auto_map" in config
    if not is_custom and not (is_verified and config):
        return
    yield "\n```python"
    if is_custom and not has_code:
        yield "import spkv_nas  # adds the model type to transformers"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    # Without it, the tokenizer asks whether to run the code
    code = ", trust_remote_code=True" if has_code else ""
    yield f'model = AutoModelForCausalLM.from_pretrained("DIR"{code})'
    yield f'tokenizer = AutoTokenizer.from_pretrained("DIR"{code})\n```'
    if has_code:
        yield (
            "\n"
            "With spkv-nas installed, `import spkv_nas` before these lines replaces the code in "
            "the folder."
        )
    command = serve_command(engines, "DIR")
    if command is not None:
        condition = ", with spkv-nas installed beside vLLM" if is_custom else ""
        yield f"\nTo serve it: `{command}`{condition}."


def _bullets(lines: Iterable[str]) -> str:
    """Return lines as a list."""
    return "\n".join(f"- {line}" for line in lines)


@dataclass(frozen=True)
class Exported:
    """Outcome of an export; as a string, sentences for the user."""

    folder: Path  # the folder that was written
    target: str  # name of the target
    form: str  # what it is, what loads it, and how the weights were written
    rejected: Mapping[str, str]  # why each target that comes before it was not taken, by name
    # What each engine does with it, such as "exact" or "refused", by name and version
    engines: Mapping[str, str]

    def __str__(self) -> str:
        """Return a sentence on the folder, and lines on the targets that were not taken and on engines."""
        names: dict[str, list[str]] = {}
        for name, reason in self.rejected.items():
            names.setdefault(reason, []).append(name)
        reasons = [
            f"not exported as {' and '.join(targets)}: {reason}"
            for reason, targets in names.items()
        ]
        engines = [f"  {engine}: {outcome}" for engine, outcome in self.engines.items()]
        heading = (
            ["by the support matrix, not run here (serve-check runs an engine):"] if engines else []
        )
        return "\n".join([f"{self.folder}: {self.form}", *reasons, *heading, *engines])


def export(
    layout: Layout | None,
    checkpoint: files.StrPath,
    out: files.StrPath,
    *,
    to: str | ExportTarget = registry.AUTO,
    engine: str | None = None,
    link: bool = False,
    evidence: Sequence[str] | None = (),
    **options: Any,
) -> Exported:
    """Write a checkpoint with ``layout`` to the folder ``out``.

    By default a layer-wise layout becomes a native architecture where one computes the same (``native.py``, or
    with learned sinks a GraniteSWA), which a subprocess with plain ``transformers`` verifies. Any other hybrid
    gets the model type ``spkv``, which ``spkv_nas.load`` loads, and plain ``transformers`` with
    ``trust_remote_code=True`` (``registry.SpkvTarget``). The checkpoint's gates are dropped.

    Args:
        layout: layout to apply; None takes the checkpoint's, which exports a retrained hybrid as it is.
        checkpoint: model folder or id.
        out: a new or empty folder, which appears once it is complete; of several exports at once, the first stays.
        to: a target or its name; "auto" takes the first of the registry that can express the layout.
        engine: name of an engine that must compute the hybrid from what is written.
        link: make hard links to the checkpoint's files, which use no disk space; writing to either changes both.
        evidence: sentences on what was measured, for the model card (``README.md``); None: write no card.
        options: options of the targets by name; those of packages may have some.

    Returns:
        What was written, and why not as an earlier target.

    Raises:
        UserError: ``out`` holds files already, the checkpoint cannot be loaded, the layout does not fit it or is
            missing, the target or the engine is unknown, no target can express the layout in a form that the engine
            runs, the target lacks an option, or its check could not run.

    Warns:
        UserWarning: the checkpoint is a hybrid that was retrained with another layout.
    """
    # Choose the targets to try
    _ = engine is None or ENGINES[engine]  # raises
    candidates = registry.chosen_targets(to, options, engine)
    # Load the model and apply the layout
    new = replace.check_new(Path(out))
    model, tokenizer = load(checkpoint, mapped=True)
    layout = _chosen(layout, config_section.checkpoint_layout(model), checkpoint)
    windows.apply_layout(model, layout)  # also checks the shape
    hybrid = Hybrid(model, tokenizer, layout, weight_files(checkpoint), link)
    facts = None if evidence is None else CardFacts(new.name, checkpoint, evidence)
    # Write it as the first target that can express it
    rejected: dict[str, str] = {}
    for target in candidates:
        try:
            cells = _cells(target, hybrid, engine)
            form, cells = _write(target, hybrid, checkpoint, new, cells, engine, facts)
            return Exported(Path(out), target.name, form, rejected, cells)
        except TargetError as error:
            rejected[target.name] = str(error)
    raise _all_rejected(rejected, engine)


def _all_rejected(rejected: Mapping[str, str], engine: str | None) -> errors.UserError:
    """Make the error for a hybrid that no target takes; ``rejected`` holds the reason of each by name."""
    reasons = "\n".join(
        f"it is not exported as {name}: {reason}" for name, reason in rejected.items()
    )
    remedy = _REMEDY if engine is None else "leave the engine out, or name another one"
    return errors.UserError(f"{reasons}\n{remedy}")


def exported_from(checkpoint: files.StrPath, engine: str | None) -> dict[str, str | None]:
    """Return what the manifest of an export says of its origin: the checkpoint's hash, and the engine it is for."""
    return {"checkpoint": checkpoint_hash(os.fspath(checkpoint)), "engine": engine}


def _cells(target: ExportTarget, hybrid: Hybrid, engine: str | None) -> dict[str, str]:
    """Return what each engine does with the form that a target gives a hybrid, by name and version.

    Raises ``TargetError``: the target cannot express the hybrid, or the engine does not compute it from this form.
    """
    layout = hybrid.layout
    reason = target.can_express(hybrid.model.config, layout)
    if reason is not None:
        raise TargetError(reason)
    config = target.architecture(hybrid.model.config, layout)
    form = target.form(hybrid.model.config, layout)
    if engine is not None:
        reason = objection(form, config, engine)
        if reason is not None:
            raise TargetError(reason)
    return outcomes(form, config)


def _write(
    target: ExportTarget,
    hybrid: Hybrid,
    checkpoint: files.StrPath,
    folder: Path,
    engines: Mapping[str, str],
    engine: str | None,
    facts: CardFacts | None,
) -> tuple[str, dict[str, str]]:
    """Write and verify a hybrid in the form of a target; return what was written, and what engines do with it.

    Raises ``TargetError``: it is not the hybrid, or ``engine`` refuses it.
    """
    with replace.new_folder(folder, replaces=False) as unfinished:
        written = target.write(hybrid, unfinished)
        if engine in written.refused_by:
            raise TargetError(written.form)
        engines = dict(engines)
        for name in written.refused_by:
            engines[ENGINES[name].full_title] = str(REFUSED)
        verified = target.verify(hybrid, unfinished)
        hybrid.layout.write(unfinished / FILE)
        # Keep the list of documents that a retrained checkpoint has learned from
        for file in source.resolve(checkpoint).glob(selection.PATTERN):
            shutil.copyfile(file, unfinished / file.name)
        manifest.write_manifest(
            unfinished, written.weights.hashes, origin=exported_from(checkpoint, engine)
        )
        # Write the card last: the manifest does not list it, so it may be edited
        if facts is not None:
            write_card(
                unfinished, hybrid, facts, form=written.form, verified=verified, engines=engines
            )
    clauses = (written.form, verified, written.weights.done)
    return "; ".join(clause for clause in clauses if clause), engines


def _chosen(requested: Layout | None, saved: Layout | None, checkpoint: files.StrPath) -> Layout:
    """Return the layout to export: the ``requested`` one, or else the checkpoint's (``saved``).

    Raises:
        UserError: there is none.

    Warns:
        UserWarning: the weights were trained for another layout.
    """
    if requested is None:
        if saved is None:
            raise errors.UserError(
                f"checkpoint {checkpoint} has no layout to export\n"
                "give a layout file of propose, or a checkpoint of train-hybrid"
            )
        return saved
    if saved is not None and saved.content_hash != requested.content_hash:
        warnings.warn(
            f"checkpoint {checkpoint} is a hybrid whose weights were trained for another layout "
            f"(hash {saved.hash}) than the one given ({requested.hash}): "
            "leave the layout out to export the hybrid as it is",
            stacklevel=3,
        )
    return requested
