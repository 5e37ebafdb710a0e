"""Export a checkpoint with a layout applied, in the form of an export target.

A layout changes the config but no weight, so most targets carry the weight files over unchanged (``weight_files.py``).
"""

import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spkv_nas.artifacts.layout import FILE, Layout
from spkv_nas.artifacts.selection import PATTERN
from spkv_nas.base import errors, files, manifest, replace
from spkv_nas.engines.engine import REFUSED
from spkv_nas.engines.registry import ENGINES, objection, outcomes
from spkv_nas.model import config_section, source, windows
from spkv_nas.model.checkpoint import load, weight_files
from spkv_nas.model.export import card, registry
from spkv_nas.model.export.target import ExportTarget, Hybrid, TargetError

_REMEDY = f"export to '{registry.AUTO}', which takes a form that can express every layout"


@dataclass(frozen=True)
class Exported:
    """Outcome of an export; as a string, sentences for the user."""

    folder: Path  # the folder that was written
    target: str  # name of the target
    form: str  # what it is, what loads it, and how the weights were written
    rejected: Mapping[str, str]  # why each target that comes before it was not taken, by name
    engines: Mapping[str, str]  # what each engine does with it, such as "exact" or "refused", by name and version

    def __str__(self) -> str:
        """Return a sentence on the folder, and lines on the targets that were not taken and on engines."""
        names: dict[str, list[str]] = {}
        for name, reason in self.rejected.items():
            names.setdefault(reason, []).append(name)
        reasons = [f"not exported as {' and '.join(targets)}: {reason}" for reason, targets in names.items()]
        engines = [f"  {engine}: {outcome}" for engine, outcome in self.engines.items()]
        heading = ["by the support matrix, not run here (serve-check runs an engine):"] if engines else []
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
    ``trust_remote_code=True`` (``spkv.py``). The checkpoint's gates are dropped.

    Args:
        layout: layout to apply; None takes the checkpoint's, which exports a retrained hybrid as it is.
        checkpoint: model folder or id.
        out: a new or empty folder; it appears in one step, once it is complete.
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
    facts = None if evidence is None else card.CardFacts(new.name, checkpoint, evidence)
    # Write it as the first target that can express it
    rejected: dict[str, str] = {}
    for target in candidates:
        try:
            cells = _cells(target, hybrid, engine)
            form, cells = _write(target, hybrid, checkpoint, new, cells, engine, facts)
            return Exported(Path(out), target.name, form, rejected, cells)
        except TargetError as error:
            rejected[target.name] = str(error)
    reasons = "\n".join(f"it is not exported as {name}: {reason}" for name, reason in rejected.items())
    raise errors.UserError(f"{reasons}\n{_REMEDY if engine is None else 'leave the engine out, or name another one'}")


def _cells(target: ExportTarget, hybrid: Hybrid, engine: str | None) -> dict[str, str]:
    """Return what each engine does with the form that a target gives a hybrid, by name and version.

    Raises ``TargetError``: the target cannot express the hybrid, or the engine does not compute it from this form.
    """
    if (reason := target.can_express(hybrid.model.config, hybrid.layout)) is not None:
        raise TargetError(reason)
    config = target.architecture(hybrid.model.config, hybrid.layout)
    form = target.form(hybrid.model.config, hybrid.layout)
    if engine is not None and (reason := objection(form, config, engine)) is not None:
        raise TargetError(reason)
    return outcomes(form, config)


def _write(
    target: ExportTarget,
    hybrid: Hybrid,
    checkpoint: files.StrPath,
    folder: Path,
    engines: Mapping[str, str],
    engine: str | None,
    facts: card.CardFacts | None,
) -> tuple[str, dict[str, str]]:
    """Write and verify a hybrid in the form of a target; return what was written, and what engines do with it.

    Raises ``TargetError``: it is not the hybrid, or ``engine`` refuses it.
    """
    with replace.new_folder(folder) as unfinished:
        written = target.write(hybrid, unfinished)
        if engine in written.refused_by:
            raise TargetError(written.form)
        engines = {**engines, **{ENGINES[name].full_title: str(REFUSED) for name in written.refused_by}}
        verified = target.verify(hybrid, unfinished)
        hybrid.layout.write(unfinished / FILE)
        # Keep the list of documents that a retrained checkpoint has learned from
        for file in source.resolve(checkpoint).glob(PATTERN):
            shutil.copyfile(file, unfinished / file.name)
        manifest.write_manifest(unfinished, written.weights.hashes)
        # Write the card last: the manifest does not list it, so it may be edited
        if facts is not None:
            card.write_card(unfinished, hybrid, facts, form=written.form, verified=verified, engines=engines)
    return "; ".join(clause for clause in (written.form, verified, written.weights.done) if clause), engines


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
            f"checkpoint {checkpoint} is a hybrid whose weights were trained for another layout (hash {saved.hash}) "
            f"than the one given ({requested.hash}): leave the layout out to export the hybrid as it is",
            stacklevel=3,
        )
    return requested
