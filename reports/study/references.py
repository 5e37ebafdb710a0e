"""A reference of the study: its dense model, its text in two parts, and where its results lie."""

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
from spkv_nas.training.branches import BranchContext
from spkv_nas.training.recipe import BranchConfig, GatesConfig, Recipe

_TRAINS = ("model", "tokenizer", "data", "dense", "branch", "gates", "seed", "precision")  # sections of a recipe
_DECIDES = {  # beside the recipe: with another of these, results would not be one table
    "window", "chosen_on", "scored_on", "branch", "priced", "unpriced", "frozen", "duo_steps", "regression_layouts",
    "random", "search",
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A reference by its name in the plan; ``runs`` has all results of the study, ``base`` is the plan's folder."""

    name: str
    plan: Plan
    base: Path
    runs: Path
    reporter: Reporter

    @property
    def folder(self) -> Path:
        """Of the results."""
        return self.runs / self.name

    @property
    def note(self) -> Path:
        """The file that says what was prepared."""
        return self.folder / "reference.json"

    @cached_property
    def recipe(self) -> Recipe:
        """Of the dense model."""
        return self.plan.recipe(self.name, self.base)[0]

    @property
    def identity(self) -> str:
        """Changes with whatever in the plan decides this reference's results."""
        parts = [self.recipe.content_hash(*_TRAINS), self.plan.model_dump(mode="json", include=_DECIDES)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def check(self) -> dict[str, Any]:
        """The note. Raises ``UserError``: the reference is not prepared, or was by another plan."""
        if not self.note.is_file():
            raise UserError(f"reference '{self.name}' is not prepared in {self.runs}: run prepare first")
        note = read_json(self.note, "note of a reference")
        if note["identity"] != self.identity:
            raise UserError(
                f"{self.folder} has results of another plan: give another --runs, or remove that folder to start over"
            )
        return note

    def prepare(self) -> None:
        """Tokenise the text, train the dense model, and note both."""
        chosen, judged = self.parts
        write_json(
            self.note,
            {
                "identity": self.identity,
                "dense": str(self.trunk.dense),
                "grid": list(read_shape(str(self.trunk.dense)).grid),
                "chosen_on": chosen.tokens.size,
                "judged_on": judged.tokens.size,
                "judged_documents": len(set(judged.document.ravel().tolist())),
                "trained_on": self.trunk.corpus.train.tokens.size,
                "environment": environment(),
            },
        )

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Layers and KV heads, of a prepared reference."""
        layers, heads = self.check()["grid"]
        return layers, heads

    def heads(self, budget: str) -> int:
        """Global heads of a budget of the plan."""
        return parse_budget(budget, self.grid[0] * self.grid[1])

    @cached_property
    def trunk(self) -> BranchContext:
        """Dense checkpoint and text; all references share a folder, so that a text is tokenised once."""
        recipe, start = self.plan.recipe(self.name, self.base)
        return BranchContext.prepare(recipe, start, self.runs / "models", reporter=self.reporter)

    @cached_property
    def parts(self) -> tuple[TokenBlocks, TokenBlocks]:
        """Held-out text to choose on, and to judge on; no document is in both."""
        return parted(self.trunk.corpus.heldout, self.plan.chosen_on)

    @property
    def searching(self) -> BranchContext:
        """The trunk of a search, which chooses on the first held-out blocks: some of the first part, spread."""
        first, second = self.parts
        spread = first.spread(self.plan.search.tokens // first.block_size)
        return self._on(TokenBlocks(
            np.concatenate([spread.tokens, second.tokens]), np.concatenate([spread.document, second.document]),
            first.documents,
        ))  # fmt: skip

    def trunk_of(self, *, branch: dict[str, Any] | None = None, gates: dict[str, Any] | None = None) -> BranchContext:
        """The trunk of branches that are judged on the second part of the text, with sections of their own."""
        sections: dict[str, Any] = {}
        if branch is not None:
            sections["branch"] = BranchConfig.model_validate(branch)
        if gates is not None:
            sections["gates"] = GatesConfig.model_validate({"window": self.plan.window, **gates})
        trunk = self._on(self.parts[1])
        return replace(trunk, recipe=trunk.recipe.model_copy(update=sections))

    def _on(self, heldout: TokenBlocks) -> BranchContext:
        """The trunk, with other held-out text."""
        return replace(self.trunk, corpus=replace(self.trunk.corpus, heldout=heldout))

    def model(self, checkpoint: str | Path | None = None) -> PreTrainedModel:
        """A new copy of the dense model, or of another checkpoint, in the recipe's precision."""
        if checkpoint is None:
            return self.trunk.load_dense()
        dtype = "float32" if self.trunk.recipe.precision == "float32" else None
        return load_on(checkpoint, choose_device(self.trunk.device), dtype)[0]


def parted(text: TokenBlocks, num_tokens: int) -> tuple[TokenBlocks, TokenBlocks]:
    """Part a text by document: the documents of its first ``num_tokens`` tokens, and all others, each in whole blocks.

    Raises:
        UserError: one of the two does not fill a block.
    """
    owner = text.document.reshape(-1)
    is_first = np.isin(owner, owner[: max(num_tokens, 1)])
    parts = [
        TokenBlocks(text.tokens.reshape(1, -1)[:, chosen], owner[None, chosen], text.documents).cut(text.block_size)
        for chosen in (is_first, ~is_first)
    ]
    if any(part.num_blocks == 0 for part in parts):
        raise UserError(
            f"{len(owner)} tokens cannot be parted by document at {num_tokens}, with a block of {text.block_size} "
            "on either side\ngive more text, a larger data.max_heldout_tokens, or another number"
        )
    return parts[0], parts[1]
