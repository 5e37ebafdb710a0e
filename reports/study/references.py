"""Represent a reference of the study: its dense model, its text in two parts, and the folder of its results."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from plan import Plan
from transformers import PreTrainedModel

from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_json, write_json
from spkv_nas.base.progress import Reporter
from spkv_nas.base.replace import new_folder
from spkv_nas.base.version import environment
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.checkpoint import checkpoint_hash, load, read_shape, save
from spkv_nas.probing.sinks import measure_sinks
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.training.branches import BranchContext
from spkv_nas.training.variants import Variant

# For every reference
_DECIDES = {
    "window",
    "tau",
    "data",
    "chosen_on",
    "scored_on",
    "judged_on",
    "precision",
    "steps",
    "heal",
}
_START_OVER = "give another --results, or remove that folder to start over"


@dataclass(frozen=True)
class Subject:
    """A reference of the study.

    Attributes:
        name: name in the plan.
        plan: plan of the study.
        base: folder of the plan.
        results: folder of all results of the study.
        runs: folder of models, text and unfinished work.
        reporter: receives progress and status messages.
    """

    name: str
    plan: Plan
    base: Path
    results: Path
    runs: Path
    reporter: Reporter

    @property
    def folder(self) -> Path:
        """Return the folder of its results."""
        return self.results / self.name

    @property
    def work(self) -> Path:
        """Return the folder of its unfinished work."""
        return self.runs / self.name

    @property
    def note(self) -> Path:
        """Return the file that records which model and text its results are of."""
        return self.folder / "reference.json"

    @property
    def location(self) -> Path:
        """Return the file that says where its dense model is; it is there once the reference is prepared."""
        return self.work / "dense.json"

    @property
    def kept(self) -> Path:
        """Return the folder of its dense model if the plan trains it: in bfloat16, among its results."""
        return (self.folder / "model").resolve()

    @property
    def identity(self) -> str:
        """Return a hash of everything in the plan that this reference's results depend on."""
        reference = self.plan.references[self.name].model_dump(mode="json")
        phases = (
            self.plan.model_dump(mode="json", include={"stable", "decay"})
            if reference["stable"]
            else {}
        )
        parts = [reference, phases, self.plan.model_dump(mode="json", include=_DECIDES)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        """Read the note.

        Raises:
            UserError: the reference was prepared by another plan.
        """
        facts = read_json(self.note, "note of a reference")
        if facts["identity"] != self.identity:
            raise UserError(f"{self.folder} has results of another plan: {_START_OVER}")
        return facts

    def check(self) -> None:
        """Check that the reference is prepared.

        Raises:
            UserError: it is not, or was prepared by another plan or with another model.
        """
        if not self.location.is_file() or not self.note.is_file():
            raise UserError(
                f"reference '{self.name}' is not prepared in {self.runs}: run prepare first"
            )
        if self.facts()["model"] != checkpoint_hash(self.dense):
            raise UserError(f"{self.folder} has results of another model: {_START_OVER}")

    @property
    def dense(self) -> str:
        """Return the path or name of the dense model; the reference must be prepared."""
        return str(read_json(self.location, "location of a model")["dense"])

    def prepare(self) -> None:
        """Train the dense model if the plan says so, tokenize the text, and record both.

        Raises:
            UserError: there are results of another plan, model or text.
        """
        dense = self._trained()
        context = self._context(dense)
        chosen, judged = self._parts(context.corpus.heldout)
        facts = {
            "identity": self.identity,
            "model": checkpoint_hash(dense),
            "text": hashlib.sha256(chosen.tokens.tobytes() + judged.tokens.tobytes()).hexdigest(),
            "grid": list(read_shape(dense).grid),
            "chosen_on": chosen.tokens.size,
            "judged_on": judged.tokens.size,
            "judged_documents": len(set(judged.document.ravel().tolist())),
            "environment": environment(),
        }
        # Existing results must be of this model and text; their environment may differ
        if not self.note.is_file():
            sinks = measure_sinks(context.load_dense(), chosen, self.plan.window)
            write_json(self.note, {**facts, "sinks": sinks.number, **sinks.as_mapping()})
        for key in ("model", "text"):
            if self.facts()[key] != facts[key]:
                raise UserError(f"{self.folder} has results of another {key}: {_START_OVER}")
        write_json(self.location, {"dense": dense})

    def _trained(self) -> str:
        """Return the dense model: a finished one, or the kept checkpoint of the plan's two phases.

        Raises:
            UserError: a document that the study chooses or judges on is in the text of one of the phases.
        """
        model = self.plan.references[self.name].model
        if model is not None:
            file = self.base / model
            return str(file.resolve()) if file.exists() else model
        if self.kept.is_dir() and self.note.is_file():
            self.facts()  # of the same plan
            return str(self.kept)
        # Train the stable phase, then decay it; an interrupted phase resumes
        folder = self.runs / "models"
        stable = BranchContext.prepare(
            self.plan.training(self.name, self.base), self.base, folder, reporter=self.reporter
        )
        decay = BranchContext.prepare(
            self.plan.training(self.name, self.base, stable.dense),
            self.base,
            folder,
            reporter=self.reporter,
        )
        checkpoint = str(decay.train(Variant.full_attention()).checkpoint)
        # Check that what was held out of the study's text was held out of theirs
        heldout = {document.id for document in self._context(checkpoint).corpus.heldout.documents}
        for phase in (stable, decay):
            seen = [
                document.name for document in phase.corpus.train.documents if document.id in heldout
            ]
            if seen:
                raise UserError(
                    f"reference '{self.name}' was trained on {len(seen)} documents that the study judges on, the first "
                    f"{seen[0]}\ngive its phases the study's data.heldout"
                )
        # Keep the model beside its results in half the bytes, because no other machine trains quite the same one
        with new_folder(self.kept) as folder:
            save(*load(checkpoint, dtype=torch.bfloat16), folder)
        return str(self.kept)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Return the numbers of layers and KV heads; the reference must be prepared."""
        layers, heads = self.facts()["grid"]
        return layers, heads

    def heads(self, budget: str) -> int:
        """Return the number of global heads of a budget in the plan."""
        return parse_budget(budget, self.grid[0] * self.grid[1])

    @cached_property
    def context(self) -> BranchContext:
        """Return dense checkpoint and text; the reference must be prepared."""
        return self._context(self.dense)

    def _context(self, dense: str) -> BranchContext:
        """Return a dense checkpoint with the study's text; all references share a folder of tokenized text."""
        recipe = self.plan.recipe(self.name, self.base, dense)
        return BranchContext.prepare(
            recipe, self.base, self.runs / "models", reporter=self.reporter
        )

    @cached_property
    def parts(self) -> tuple[TokenBlocks, TokenBlocks]:
        """Return the held-out text for selection and the one for evaluation; they share no document."""
        return self._parts(self.context.corpus.heldout)

    def _parts(self, heldout: TokenBlocks) -> tuple[TokenBlocks, TokenBlocks]:
        """Return the two parts of held-out text, the second of the plan's size, from as many documents as possible."""
        chosen, judged = parted(heldout, self.plan.chosen_on)
        return chosen, judged.spread(max(1, self.plan.judged_on // judged.block_size))

    def healing(self, steps: int, *, learns_sinks: bool = False) -> BranchContext:
        """Return a context whose branches are retrained for ``steps`` steps and judged on the second part of the text.

        Args:
            steps: steps of the retraining.
            learns_sinks: give local heads a learned sink each.
        """
        recipe = self.plan.recipe(self.name, self.base, str(self.context.dense), steps)
        branch = recipe.branch.model_copy(update={"sinks": "learned" if learns_sinks else None})
        corpus = replace(self.context.corpus, heldout=self.parts[1])
        return replace(
            self.context, recipe=recipe.model_copy(update={"branch": branch}), corpus=corpus
        )

    def model(self) -> PreTrainedModel:
        """Load the dense model in the plan's precision."""
        return self.context.load_dense()


def parted(text: TokenBlocks, num_tokens: int) -> tuple[TokenBlocks, TokenBlocks]:
    """Split a text by document: documents of its first ``num_tokens`` tokens, and all others, each in whole blocks.

    Raises:
        UserError: one of the parts does not fill a block.
    """
    openings = len(text.opening)
    tokens, owner = text.tokens[:, openings:].reshape(-1), text.document[:, openings:].reshape(-1)
    is_first = np.isin(owner, owner[: max(num_tokens, 1)])
    parts = [_in_blocks(text, tokens[chosen], owner[chosen]) for chosen in (is_first, ~is_first)]
    if any(part.num_blocks == 0 for part in parts):
        raise UserError(
            f"{len(owner)} tokens cannot be split by document at {num_tokens}, with a block of {text.block_size} "
            "on either side\ngive more text, a larger data.max_heldout_tokens, or another number"
        )
    return parts[0], parts[1]


def _in_blocks(
    text: TokenBlocks, tokens: NDArray[np.int32], owner: NDArray[np.int32]
) -> TokenBlocks:
    """Return tokens of a text and their documents in blocks that begin as the text's blocks do."""
    line = np.concatenate([np.array(text.opening, dtype=np.int32), tokens])
    owners = np.concatenate([owner[:1].repeat(len(text.opening)), owner])
    whole = TokenBlocks(line[None], owners[None], text.documents, boundaries=text.boundaries)
    return whole.cut(text.block_size)
