"""The branches of a dense checkpoint: trained, evaluated, and recognised by the names of their folders.

SP-KV paper, "Overall protocol": branches differ in attention alone and share data order, number of steps, learning
rates and optimizer state.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spkv_nas.base.distributed import num_processes, on_main
from spkv_nas.base.files import sha256_file, write_json
from spkv_nas.base.progress import Announce, silent
from spkv_nas.base.version import environment
from spkv_nas.evaluation.paired import DocumentNLL
from spkv_nas.evaluation.split import split_evaluation
from spkv_nas.evaluation.sweep import Evaluation, evaluate
from spkv_nas.model.checkpoint import MANIFEST, is_complete, write_manifest
from spkv_nas.training.arguments import training_arguments
from spkv_nas.training.branch_setup import BranchSetup, set_up
from spkv_nas.training.corpus import Corpus, load_corpus
from spkv_nas.training.dense import dense_checkpoint
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.run_files import save_run, write_density_log, write_heldout_log
from spkv_nas.training.sharding import whole_weights
from spkv_nas.training.trainer import BlockDataset, HeldoutCallback, SPKVTrainer, TokenProgressCallback
from spkv_nas.training.variants import Kind, Variant

_RECORD, _NLL = "run.json", "heldout-nll.npz"


@dataclass(frozen=True)
class Branch:
    """A finished branch: its checkpoint, and its held-out NLL by document."""

    checkpoint: Path
    nll: DocumentNLL
    density: float | None  # mean over heads and held-out tokens at the recipe's tau; None without gates
    steps: int


@dataclass(frozen=True)
class Trunk:
    """What the branches of a recipe share: its text, and the dense checkpoint that they start from.

    ``runs`` is the folder of checkpoints and caches.
    """

    recipe: Recipe
    corpus: Corpus
    dense: Path
    runs: Path
    device: str | None = None

    @classmethod
    def prepare(
        cls, recipe: Recipe, base: Path, runs: Path, *, device: str | None = None, announce: Announce = silent
    ) -> Trunk:
        """Tokenise the text and train the dense model, unless that is done; ``join_processes`` comes before.

        Args:
            base: folder that the recipe's relative paths start from.
        """
        announce("reading and tokenising text")
        corpus = load_corpus(recipe, base, runs)
        return cls(recipe, corpus, dense_checkpoint(recipe, corpus, runs, device=device), runs, device)

    def folder(self, variant: Variant, seed: int | None = None) -> Path:
        """Of a branch, trained or not; ``seed`` is the recipe's by default."""
        return self.runs / "branches" / branch_key(self.recipe, self.dense, variant, self._seed(seed))

    def train(self, variant: Variant, seed: int | None = None) -> Branch:
        """Train a branch, or read it if it has been trained; ``seed`` is the recipe's by default."""
        return train_branch(
            self.recipe, self.corpus, self.dense, self.folder(variant, seed), variant,
            seed=self._seed(seed), device=self.device,
        )  # fmt: skip

    def _seed(self, seed: int | None) -> int:
        return self.recipe.seed if seed is None else seed


def branch_key(recipe: Recipe, dense: Path, variant: Variant, seed: int) -> str:
    """Name of a branch's folder: the variant, and a hash of all that decides the result."""
    sections = ["branch", "data", "evaluation", "precision"]
    if variant.kind is Kind.SP_KV:
        sections.append("gates")
    parts: list[Any] = [recipe.content_hash(*sections), seed]
    manifest = dense / MANIFEST
    parts.append(sha256_file(manifest) if manifest.is_file() else str(dense))
    return f"{variant.key}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}-seed{seed}"


def train_branch(
    recipe: Recipe,
    corpus: Corpus,
    dense: Path | str,
    folder: Path,
    variant: Variant,
    *,
    seed: int | None = None,
    device: str | None = None,
) -> Branch:
    """Train one branch of the dense checkpoint and evaluate it. Resumes, or returns the finished run.

    Args:
        seed: of the data order (and of new predictors); the recipe's by default.
    """
    final = folder / "final"
    if on_main(lambda: is_complete(final)):
        return read_branch(final)
    seed = recipe.seed if seed is None else seed
    setup = set_up(recipe, corpus, dense, variant, seed)
    trainer = SPKVTrainer(
        model=setup.model,
        args=training_arguments(recipe, setup.phase, folder, device=device, seed=seed + 1),
        train_dataset=BlockDataset(corpus.train),
        schedule=setup.schedule,
        gates=setup.gates,
        gate_options=recipe.gates,
        optimizer_state=setup.optimizer_state,
        callbacks=[TokenProgressCallback(variant.name)],
    )
    if setup.gates is not None and recipe.evaluation.every is not None:
        part = corpus.heldout.take(max(1, recipe.evaluation.max_tokens // corpus.heldout.block_size))
        trainer.add_callback(HeldoutCallback(trainer, part, recipe.evaluation.every))
    trainer.train_or_resume()
    measured = _evaluate(setup, recipe, corpus)
    record = _record(variant, setup, measured, recipe, seed)
    weights = whole_weights(trainer.model)

    def finish() -> None:
        save_run(trainer, corpus.tokenizer, weights, final)
        measured.nll.save(final / _NLL)
        write_heldout_log(trainer.state, final / "heldout-log.csv")
        write_density_log(trainer.state, final / "density-log.csv")
        write_json(final / _RECORD, record)
        write_manifest(final)
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)

    on_main(finish)
    return read_branch(final)


def _evaluate(setup: BranchSetup, recipe: Recipe, corpus: Corpus) -> Evaluation:
    """On the held-out text, at the recipe's tau where there are gates; collective."""
    tau = None if setup.gates is None else recipe.gates.tau
    size = recipe.evaluation.batch_size
    return split_evaluation(
        setup.model, corpus.heldout, size, lambda blocks: evaluate(setup.model, blocks, tau, batch_size=size)
    )


def _record(variant: Variant, setup: BranchSetup, measured: Evaluation, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What ``run.json`` says of a branch."""
    return {
        "variant": variant.name,
        "heldout_nll": measured.nll.mean,
        "heldout_tokens": int(measured.nll.num_tokens.sum()),
        "heldout_density": measured.density,
        "steps": setup.phase.steps,
        "seed": seed,
        "processes": num_processes(),
        "recipe": recipe.model_dump(mode="json"),
        "environment": environment(),
    }


def read_branch(final: Path) -> Branch:
    """A finished branch from its folder."""
    record = json.loads((final / _RECORD).read_text())
    return Branch(final, DocumentNLL.read(final / _NLL), record["heldout_density"], record["steps"])
