"""Branches of a dense checkpoint: train and evaluate them, and find finished ones by the names of their folders."""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.result_tables import RUN_RECORD
from spkv_nas.base import distributed, files, manifest, schema, version
from spkv_nas.base.device import choose_device
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.base.replace import new_folder
from spkv_nas.data.splits import RULE
from spkv_nas.evaluation import nll, paired
from spkv_nas.model import checkpoint, source
from spkv_nas.training import arguments, branch_setup, callbacks, run_files, sharding, variants
from spkv_nas.training.corpus import Corpus, load_corpus, training_data
from spkv_nas.training.dense import dense_checkpoint
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.trainer import SPKVTrainer, train_in_fitting_passes

_NLL = "heldout-nll.npz"


class _RunRecord(schema.Recorded):
    """Keys of ``run.json`` that are read back."""

    steps: int
    heldout_density: float | None


@dataclass(frozen=True)
class Branch:
    """Finished branch: its checkpoint and its held-out NLL."""

    checkpoint: Path  # folder of the checkpoint
    nll: paired.DocumentNLL  # held-out NLL by document
    # Mean over heads and held-out tokens at the recipe's tau; None without gates
    density: float | None
    steps: int  # number of training steps


@dataclass(frozen=True)
class BranchContext:
    """Context shared by the branches of a recipe."""

    recipe: Recipe  # the recipe, with its precision resolved
    corpus: Corpus  # the recipe's text
    dense: Path  # the dense checkpoint that branches start from
    runs: Path  # folder of checkpoints and caches
    device: str | None = None  # device to train on; chosen automatically by default
    reporter: Reporter = SILENT  # receives messages and progress

    @classmethod
    def prepare(
        cls,
        recipe: Recipe,
        base: Path,
        runs: Path,
        *,
        device: str | None = None,
        reporter: Reporter = SILENT,
    ) -> "BranchContext":
        """Tokenize the text and train the dense model, or reuse earlier results; call ``join_processes`` first.

        ``precision: auto`` is resolved for the device of rank 0. The recipe's relative paths start from ``base``.
        """
        recipe = distributed.on_main(lambda: recipe.resolve_precision(choose_device(device)))
        corpus = load_corpus(recipe, base, runs, reporter=reporter)
        dense = dense_checkpoint(recipe, corpus, runs, device=device, reporter=reporter)
        return cls(recipe, corpus, dense, runs, device, reporter)

    @cached_property
    def _origin(self) -> str:
        return checkpoint.checkpoint_hash(self.dense)

    def _seed(self, seed: int | None) -> int:
        return self.recipe.seed if seed is None else seed

    def folder(self, variant: variants.Variant, seed: int | None = None) -> Path:
        """Return the folder of a branch, trained or not; ``seed`` defaults to the recipe's."""
        return branch_folder(
            self.recipe, self.dense, self.runs, variant, self._seed(seed), origin=self._origin
        )

    def load_dense(self) -> PreTrainedModel:
        """Load the dense checkpoint for evaluation, in float32 if the recipe trains in it, else in its stored dtype."""
        dtype = "float32" if self.recipe.precision == "float32" else None
        return checkpoint.load_on(self.dense, choose_device(self.device), dtype)[0]

    def is_trained(self, variant: variants.Variant, seed: int | None = None) -> bool:
        """Return True if a branch has finished; ``seed`` defaults to the recipe's."""
        final_folder = self.folder(variant, seed) / "final"
        return distributed.on_main(lambda: is_finished(final_folder))

    def train(
        self, variant: variants.Variant, seed: int | None = None, folder: Path | None = None
    ) -> Branch:
        """Train and evaluate a branch; an interrupted run resumes, a finished one is read.

        ``seed``, of the data order and of new predictors, defaults to the recipe's, ``folder`` to one named by all that
        determines the result. Raises ``UserError`` if the run was begun on another text, cannot be set up, or cannot be
        written.
        """
        folder = folder or self.folder(variant, seed)
        self.reporter.detail(f"{variant.name}: {folder}")
        final = folder / "final"
        distributed.on_main(lambda: run_files.check_text(folder, self.corpus.text))
        if not distributed.on_main(lambda: is_finished(final)):
            # Look again with the lock, as another process may have finished the run meanwhile
            with run_files.run_lock(folder, self.reporter.announce):
                if not distributed.on_main(lambda: is_finished(final)):
                    _train(self, folder, variant, self._seed(seed))
        distributed.on_main(lambda: run_files.remove_checkpoints(folder))
        return read_branch(final)


def branch_folder(
    recipe: Recipe,
    dense: Path,
    runs: Path,
    variant: variants.Variant,
    seed: int,
    *,
    origin: str | None = None,
) -> Path:
    """Return a branch's folder; a known ``origin``, ``checkpoint_hash(dense)``, saves hashing the weights."""
    return (
        runs
        / "branches"
        / branch_key(recipe, origin or checkpoint.checkpoint_hash(dense), variant, seed)
    )


def branch_key(recipe: Recipe, origin: str, variant: variants.Variant, seed: int) -> str:
    """Return a branch's folder name: its variant, and a hash of what matters; ``origin`` is the dense weights'."""
    if variant.layout is None:  # only layouts have learned sinks
        recipe = recipe.model_copy(
            update={"branch": recipe.branch.model_copy(update={"sinks": None})}
        )
    sections = ["branch", "data", "evaluation", "precision", "lora", "optimizer"]
    if variant.kind is variants.Kind.SP_KV:
        sections.append("gates")
    parts = [recipe.content_hash(*sections), seed, origin, RULE]
    return f"{variant.key}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}-seed{seed}"


def is_finished(final: Path) -> bool:
    """Return True if the branch in ``final`` was trained and evaluated to the end."""
    return manifest.is_complete(final, (RUN_RECORD, _NLL))


def _train(context: BranchContext, folder: Path, variant: variants.Variant, seed: int) -> None:
    """Train and evaluate a branch, and write the subfolder ``final`` of ``folder``."""
    # Train
    recipe = context.recipe
    corpus = context.corpus
    reporter = context.reporter
    sink_logits: list[Tensor] | None = None
    if (layout := variant.layout) is not None and branch_setup.learns_sinks(recipe, variant):
        sink_logits = distributed.on_main(
            lambda: branch_setup.measure_initial_sinks(context.load_dense(), layout, corpus.train)
        )

    def begin(recipe: Recipe) -> SPKVTrainer:
        setup = branch_setup.set_up(recipe, context.dense, variant, seed, sink_logits)
        distributed.on_main(lambda: checkpoint.check_savable(setup.model, corpus.tokenizer))
        return _trainer(replace(context, recipe=recipe), setup, folder, variant, seed)

    trainer = train_in_fitting_passes(
        branch_setup.branch_recipe(recipe, variant), begin, recipe.least_blocks(recipe.branch)
    )
    trained_parameters = sum(
        parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad
    )
    if recipe.lora is not None:
        branch_setup.merge_adapters(trainer.model)

    # Evaluate on held-out text, at the recipe's tau with gates
    tau = recipe.gates.tau if variant.kind is variants.Kind.SP_KV else None
    size = recipe.evaluation.batch_size
    with reporter.bar(f"{variant.name}, held-out text", "blocks") as progress:
        sharding.spare_passes(trainer.model, corpus.heldout, size)
        measured = nll.evaluate(
            trainer.model, corpus.heldout, tau, batch_size=size, progress=progress
        )
    record = _record(variant, trainer.args.max_steps, measured, recipe, seed, trained_parameters)
    # Write the checkpoint, the results and the logs
    weights = sharding.whole_weights(trainer.model)

    def finish() -> None:
        with new_folder(folder / "final") as new:
            run_files.save_run(trainer, corpus.tokenizer, weights, new)
            measured.nll.save(new / _NLL)
            run_files.write_density_log(trainer.state, new / "density-log.csv")
            files.write_json(new / RUN_RECORD, record)
            manifest.write_manifest(new)

    distributed.on_main(finish)


def _trainer(
    context: BranchContext,
    setup: branch_setup.BranchSetup,
    folder: Path,
    variant: variants.Variant,
    seed: int,
) -> SPKVTrainer:
    """Build the trainer of a branch, with its callbacks."""
    recipe = context.recipe
    corpus = context.corpus
    trainer = SPKVTrainer(
        model=setup.model,
        args=arguments.training_arguments(
            recipe, recipe.branch, folder, device=context.device, seed=seed + 1
        ),
        train_dataset=training_data(recipe, corpus, recipe.branch, seed + 1),
        schedule=setup.schedule,
        gates=setup.gates,
        gate_options=recipe.gates,
        optimizer_state=setup.optimizer_state,
        recomputes=recipe.gradient_checkpointing,
        compiles=arguments.compiles(recipe, recipe.branch, setup.model, context.device),
        distillation=setup.distillation,
        title=variant.name,
        reporter=context.reporter,
    )
    if (extend := recipe.branch.extend) is not None:
        trainer.add_callback(callbacks.ExtensionCallback(extend, recipe.branch.steps))
    return trainer


def _record(
    variant: variants.Variant,
    steps: int,
    measured: nll.Evaluation,
    recipe: Recipe,
    seed: int,
    trained_parameters: int,
) -> dict[str, object]:
    """Return the content of a branch's ``run.json``."""
    commit = (
        None
        if recipe.model.path is None
        else source.pinned(str(source.resolve(recipe.model.path)))[1]
    )
    return {
        "variant": variant.name,
        "heldout_nll": measured.nll.mean,
        "heldout_tokens": int(measured.nll.num_tokens.sum()),
        "heldout_density": measured.density,
        "steps": steps,
        "trained_parameters": trained_parameters,
        "seed": seed,
        "processes": distributed.num_processes(),
        "recipe": recipe.model_dump(mode="json"),
        **({} if commit is None else {"model_commit": commit}),
        "environment": version.environment(),
    }


def read_branch(final: Path) -> Branch:
    """Read a finished branch from its folder, without its weights. Raises ``UserError``: a file is damaged."""
    names = [
        name for name in manifest.read_manifest(final) if not name.endswith(manifest.WEIGHT_ENDINGS)
    ]
    manifest.check_manifest(final, names)
    file = final / RUN_RECORD
    record = schema.validate(_RunRecord, files.read_json(file, "run record"), f"run record {file}")
    return Branch(
        final, paired.DocumentNLL.read(final / _NLL), record.heldout_density, record.steps
    )
