"""Represent a reference of the study: its dense model, its text in two parts, and the folder of its results."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from plan import Plan
from transformers import PreTrainedModel

from spkv_nas.base.device import choose_device
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_json, write_json
from spkv_nas.base.progress import Reporter
from spkv_nas.base.version import environment
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.checkpoint import load_on, read_shape
from spkv_nas.proposal.budget import parse_budget
from spkv_nas.training.branch_config import BranchConfig
from spkv_nas.training.branches import BranchContext
from spkv_nas.training.gates_config import GatesConfig
from spkv_nas.training.recipe import Recipe

_TRAINS = (
    "model",
    "tokenizer",
    "data",
    "dense",
    "branch",
    "gates",
    "seed",
    "precision",
)  # recipe sections that results depend on
_DECIDES = {  # plan sections that results depend on
    "window",
    "chosen_on",
    "scored_on",
    "branch",
    "priced",
    "unpriced",
    "frozen",
    "duo_steps",
    "regression_layouts",
    "random",
    "search",
}


@dataclass(frozen=True)
class Subject:
    """A reference of the study.

    Attributes:
        name: name in the plan.
        plan: plan of the study.
        base: folder of the plan.
        runs: folder of all results of the study.
        reporter: receives progress and status messages.
    """

    name: str
    plan: Plan
    base: Path
    runs: Path
    reporter: Reporter

    @property
    def folder(self) -> Path:
        """Return the folder of its results."""
        return self.runs / self.name

    @property
    def note(self) -> Path:
        """Return the file that records what was prepared."""
        return self.folder / "reference.json"

    @cached_property
    def recipe(self) -> Recipe:
        """Return the recipe of the dense model."""
        return self.plan.recipe(self.name, self.base)[0]

    @property
    def identity(self) -> str:
        """Return a hash of everything in the plan that this reference's results depend on."""
        parts = [self.recipe.content_hash(*_TRAINS), self.plan.model_dump(mode="json", include=_DECIDES)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def check(self) -> dict[str, Any]:
        """Read the note. Raises ``UserError`` if the reference is not prepared, or was prepared by another plan."""
        if not self.note.is_file():
            raise UserError(f"reference '{self.name}' is not prepared in {self.runs}: run prepare first")
        note = read_json(self.note, "note of a reference")
        if note["identity"] != self.identity:
            raise UserError(
                f"{self.folder} has results of another plan: give another --runs, or remove that folder to start over"
            )
        return note

    def prepare(self) -> None:
        """Tokenise the text, train the dense model, and record both in the note."""
        chosen, judged = self.parts
        write_json(
            self.note,
            {
                "identity": self.identity,
                "dense": str(self.context.dense),
                "grid": list(read_shape(str(self.context.dense)).grid),
                "chosen_on": chosen.tokens.size,
                "judged_on": judged.tokens.size,
                "judged_documents": len(set(judged.document.ravel().tolist())),
                "trained_on": self.context.corpus.train.tokens.size,
                "environment": environment(),
            },
        )

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Return the numbers of layers and KV heads; the reference must be prepared."""
        layers, heads = self.check()["grid"]
        return layers, heads

    def heads(self, budget: str) -> int:
        """Return the number of global heads of a budget in the plan."""
        return parse_budget(budget, self.grid[0] * self.grid[1])

    @cached_property
    def context(self) -> BranchContext:
        """Return dense checkpoint and text; the folder is shared by all references, so texts are tokenised once."""
        recipe, start = self.plan.recipe(self.name, self.base)
        return BranchContext.prepare(recipe, start, self.runs / "models", reporter=self.reporter)

    @cached_property
    def parts(self) -> tuple[TokenBlocks, TokenBlocks]:
        """Return the held-out text for selection and the one for evaluation; they share no document."""
        return parted(self.context.corpus.heldout, self.plan.chosen_on)

    @property
    def searching(self) -> BranchContext:
        """Return the context of a search, which selects on the first held-out blocks.

        These blocks are spread over the first part of the held-out text.
        """
        first, second = self.parts
        spread = first.spread(self.plan.search.tokens // first.block_size)
        return self._on(
            TokenBlocks(
                np.concatenate([spread.tokens, second.tokens]),
                np.concatenate([spread.document, second.document]),
                first.documents,
            )
        )

    def trunk_of(self, *, branch: dict[str, Any] | None = None, gates: dict[str, Any] | None = None) -> BranchContext:
        """Return a context whose branches are evaluated on the second part of the held-out text.

        Args:
            branch: replaces the recipe's branch section.
            gates: replaces the recipe's gates section; the window defaults to the plan's.
        """
        sections: dict[str, Any] = {}
        if branch is not None:
            sections["branch"] = BranchConfig.model_validate(branch)
        if gates is not None:
            sections["gates"] = GatesConfig.model_validate({"window": self.plan.window, **gates})
        context = self._on(self.parts[1])
        return replace(context, recipe=context.recipe.model_copy(update=sections))

    def _on(self, heldout: TokenBlocks) -> BranchContext:
        """Return the context with other held-out text."""
        return replace(self.context, corpus=replace(self.context.corpus, heldout=heldout))

    def model(self, checkpoint: str | Path | None = None) -> PreTrainedModel:
        """Load the dense model, or another checkpoint, in the recipe's precision."""
        if checkpoint is None:
            return self.context.load_dense()
        dtype = "float32" if self.context.recipe.precision == "float32" else None
        return load_on(checkpoint, choose_device(self.context.device), dtype)[0]


def parted(text: TokenBlocks, num_tokens: int) -> tuple[TokenBlocks, TokenBlocks]:
    """Split a text by document: documents of its first ``num_tokens`` tokens, and all others, each in whole blocks.

    Raises:
        UserError: one of the parts does not fill a block.
    """
    owner = text.document.reshape(-1)
    is_first = np.isin(owner, owner[: max(num_tokens, 1)])
    parts = [
        TokenBlocks(text.tokens.reshape(1, -1)[:, chosen], owner[None, chosen], text.documents).cut(text.block_size)
        for chosen in (is_first, ~is_first)
    ]
    if any(part.num_blocks == 0 for part in parts):
        raise UserError(
            f"{len(owner)} tokens cannot be split by document at {num_tokens}, with a block of {text.block_size} "
            "on either side\ngive more text, a larger data.max_heldout_tokens, or another number"
        )
    return parts[0], parts[1]
