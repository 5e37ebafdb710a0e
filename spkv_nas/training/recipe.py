"""Recipe schema: one YAML file that configures the model, the text, training and the gates, parsed strictly."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from spkv_nas.artifacts.threshold import threshold_logit
from spkv_nas.base import errors, files, limits, names, schema
from spkv_nas.base.device import training_precision
from spkv_nas.cost.formulas import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerName
from spkv_nas.cost.ladder import find_level, ladder
from spkv_nas.data.config import DataConfig
from spkv_nas.data.ruler.sample import VERSION
from spkv_nas.data.ruler.tasks import NO_MATERIAL, available
from spkv_nas.training.branch_config import BranchConfig, GatesConfig, gates_of_layout

OFFLOAD = "fsdp-offload"
_REMOVED = {"gates": {"layers": None}, "evaluation": {"every": None, "max_tokens": 65536}}
_LATER = {"compile": (False, "auto"), "lora": (None,), "optimizer": (DEFAULT_OPTIMIZER,)}


class ModelConfig(schema.Section):
    """Either ``path`` (a Hugging Face decoder) or ``config`` (a Hugging Face config for a new one)."""

    path: str | None = Field(
        None, description="dense checkpoint, a Hugging Face decoder: folder, ID, or ID@REVISION"
    )
    config: dict[str, Any] | None = Field(
        None,
        description="Hugging Face config of a new model, with model_type; section 'dense' "
        "configures its training",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> "ModelConfig":
        if (self.path is None) == (self.config is None):
            raise ValueError("set either 'path' or 'config', not both")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("'config' needs 'model_type', for example llama")
        return self


class TokenizerConfig(schema.Section):
    """Either ``path`` (a tokenizer folder or id) or ``vocab_size`` (a BPE trained on the corpus)."""

    path: str | None = Field(None, description="tokenizer folder or id")
    vocab_size: int | None = Field(
        None,
        ge=260,
        le=2**24,
        description="size of a byte-level BPE vocabulary, trained on the training text",
    )
    bos: bool = Field(
        False,
        description="with vocab_size: the tokenizer begins every text with a BOS token",
        # Hashes and records of recipes stay as before the key existed
        exclude_if=lambda bos: not bos,
    )

    @model_validator(mode="after")
    def _one_origin(self) -> "TokenizerConfig":
        if (self.path is None) == (self.vocab_size is None):
            raise ValueError("set either 'path' or 'vocab_size', not both")
        if self.bos and self.path is not None:
            raise ValueError(
                "bos is for a new tokenizer (vocab_size); that of 'path' has its own rule "
                "(data.bos)"
            )
        return self


class DenseConfig(schema.Section):
    """Train a new dense model: the stable phase, at a constant learning rate."""

    steps: int = Field(3000, ge=1, le=limits.MAX_STEPS, description="optimizer steps")
    batch_size: int = Field(
        8, ge=1, le=limits.MAX_BATCH, description="blocks per step, summed over all processes"
    )
    learning_rate: float = Field(2e-3, gt=0.0, description="constant learning rate after warm-up")
    warmup_steps: int = Field(100, ge=0, le=limits.MAX_STEPS, description="steps of linear warm-up")
    weight_decay: float = Field(0.1, ge=0.0, description="weight decay of AdamW")
    max_grad_norm: float = Field(1.0, gt=0.0, description="norm to which gradients are clipped")


class LoraConfig(schema.Section):
    """Train low-rank adapters of linear layers, and the gates' predictors, while the weights are frozen."""

    rank: int = Field(16, ge=1, le=limits.MAX_RANK, description="rank of the adapters")
    alpha: float = Field(
        32.0, gt=0.0, description="scale of the adapters: they are multiplied by alpha / rank"
    )
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout of an adapter's input")
    targets: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="names of linear layers, such as q_proj; all-linear: all of the decoder's "
        "layers",
    )


class EvaluationConfig(schema.Section):
    """Measure held-out NLL after training."""

    batch_size: int = Field(8, ge=1, le=limits.MAX_BATCH, description="blocks per forward pass")


class Recipe(schema.Section):
    """Say which model, which text, how to train it and how to gate it.

    Without ``dense``, the model at ``model.path`` is the dense checkpoint. ``model`` may be the name of a level of the
    paper's scaling ladder: its config and hyperparameters are then the defaults of the recipe.
    """

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=names.MAX_CHARACTERS,
        description="name of the results in probes/, layouts/, reports/ and runs/",
    )
    seed: int = Field(
        0,
        ge=0,
        le=limits.MAX_SEED,
        description="random seed of new weights, predictors and the data order",
    )
    model: ModelConfig = Field(
        description="model, or a level of the scaling ladder, such as micro-0"
    )
    tokenizer: TokenizerConfig | None = Field(None, description="tokenizer; default: the model's")
    data: DataConfig = Field(description="text, and how to cut it into blocks")
    dense: DenseConfig | None = Field(None, description="pre-training of a new dense model")
    branch: BranchConfig = Field(
        BranchConfig(), description="continued training, the same for every variant"
    )
    gates: GatesConfig = Field(
        GatesConfig(), description="gates of the SP-KV reference, and their training"
    )
    lora: LoraConfig | None = Field(
        None, description="train low-rank adapters (LoRA), merged into the weights at the end"
    )
    evaluation: EvaluationConfig = Field(
        EvaluationConfig(), description="evaluation of held-out NLL"
    )
    checkpoint_every: int = Field(
        200, ge=1, le=limits.MAX_STEPS, description="steps between checkpoints of a run"
    )
    report_to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        [], description="experiment trackers to log to; TensorBoard files are in the run's folder"
    )
    micro_batch_size: int | None = Field(
        None, ge=1, le=limits.MAX_BATCH, description="blocks per forward and backward pass"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="compile decoder layers with torch.compile; auto: on a GPU, in runs that gain "
        "by it",
    )
    optimizer: OptimizerName = Field(
        DEFAULT_OPTIMIZER,
        description="AdamW variant, by the trainer's name; 8-bit and paged ones need bitsandbytes",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="dtype of matrix products in training; auto: bfloat16 if the device supports "
        "it natively",
    )
    sharding: Literal["none", "fsdp", "fsdp-offload"] = Field(
        "none",
        description="with torchrun: none keeps a whole model on each GPU (DDP), fsdp shards it "
        "(FSDP2), fsdp-offload keeps the shards in CPU memory",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_level(cls, data: Any) -> object:
        name = data.get("model") if isinstance(data, dict) else None
        if isinstance(name, str) and name in ladder():
            return ladder()[name].recipe(data)
        return data

    @field_validator("model", mode="before")
    @classmethod
    def _known_level(cls, model: Any) -> Any:
        return find_level(model) if isinstance(model, str) else model

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        # Model, dense phase and gates
        if self.model.config is not None and self.dense is None:
            raise ValueError("a new model (model.config) needs a 'dense' section that trains it")
        if self.model.path is not None and self.dense is not None:
            raise ValueError("with model.path the model is the dense checkpoint: leave 'dense' out")
        if self.gates.training == "from-scratch":
            self._check_from_scratch()
        if self.sharding != "none" and OPTIMIZERS[self.optimizer].package:
            raise ValueError(
                f"optimizer: {self.optimizer} does not support shards: with sharding: "
                f"{self.sharding} leave it out"
            )
        # Mixture tasks and tokenizer
        if self.data.mix is not None:
            tasks = available(NO_MATERIAL)
            for task in set(self.data.mix.ruler.tasks_of(tasks)) - set(tasks):
                raise ValueError(f"data.mix.ruler.tasks: '{task}' is none of {', '.join(tasks)}")
        if self.model.config is not None and self.tokenizer is None:
            raise ValueError("a new model (model.config) needs a 'tokenizer'")
        # Batch sizes
        if self.dense is not None:
            self._check_batch("dense", self.dense.batch_size)
        self._check_batch("branch", self.branch.batch_size)
        self._check_extension()
        return self

    def _check_batch(self, phase: str, batch_size: int) -> None:
        """Raise ``ValueError`` unless the micro-batch size divides a larger batch."""
        size = self.micro_batch_size
        if size is not None and batch_size > size and batch_size % size:
            raise ValueError(
                f"micro_batch_size {size} does not divide {phase}.batch_size {batch_size}"
            )

    def _check_extension(self) -> None:
        """Raise ``ValueError`` unless blocks and batches divide into the longer blocks of ``branch.extend``."""
        extend = self.branch.extend
        size = self.data.block_size
        if extend is None:
            return
        if extend.block_size % size:
            raise ValueError(
                f"branch.extend.block_size {extend.block_size} is no multiple of data.block_size "
                f"{size}"
            )
        # Check that batches divide into the longer blocks
        sizes = {
            "branch.batch_size": self.branch.batch_size,
            "micro_batch_size": self.micro_batch_size,
        }
        for name, number in sizes.items():
            if number is not None and number % self.least_blocks(self.branch):
                raise ValueError(
                    f"{name} {number}: {number * size} tokens make no blocks of "
                    f"{extend.block_size}, branch.extend.block_size; give a multiple of "
                    f"{extend.block_size // size}"
                )

    def _check_from_scratch(self) -> None:
        """Raise ``ValueError`` unless gates and model can be trained from random weights in one run."""
        if self.dense is None:
            raise ValueError(
                "gates.training: from-scratch needs a new model (model.config and 'dense')"
            )
        if self.lora is not None:
            raise ValueError("gates.training: from-scratch learns all weights: leave 'lora' out")
        if self.branch.distill is not None:
            raise ValueError(
                "branch.distill needs a dense checkpoint: leave gates.training: from-scratch out"
            )
        for key in ("batch_size", "learning_rate", "weight_decay", "max_grad_norm"):
            if getattr(self.dense, key) != getattr(self.branch, key):
                raise ValueError(
                    f"gates.training: from-scratch is one run: dense.{key} and branch.{key} must "
                    "be equal"
                )

    def least_blocks(self, phase: DenseConfig | BranchConfig) -> int:
        """Return the minimum micro-batch in blocks of ``data.block_size``: one block of ``branch.extend``, if any."""
        extend = phase.extend if isinstance(phase, BranchConfig) else None
        return 1 if extend is None else extend.block_size // self.data.block_size

    @property
    def heldout_stretch(self) -> int:
        """Return the number of consecutive tokens that held-out blocks keep together: the longest block's length."""
        return self.least_blocks(self.branch) * self.data.block_size

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        """Read and validate a recipe file. Raises ``UserError`` if the file cannot be read, or a key is wrong."""
        return cls.parse(files.read_yaml(path, "recipe"), path.parent, f"recipe {path}")

    @classmethod
    def parse(cls, data: Any, base: Path, where: str) -> "Recipe":
        """Validate the data of a recipe, whose relative paths start from ``base``; ``where`` begins its errors.

        ``gates.layout``, a layout file, is converted to ``gates.heads`` (``branch_config.gates_of_layout``). Raises
        ``UserError`` for an unknown key, a wrong value, or a layout with sink tokens.
        """
        gates = data.get("gates") if isinstance(data, dict) else None
        if (
            isinstance(gates, dict)
            and isinstance(gates.get("layout"), str)
            and "heads" not in gates
        ):
            data = {**data, "gates": gates_of_layout(gates, base, where)}
        return schema.validate(cls, data, where)

    def content_hash(self, *sections: str) -> str:
        """Hash the recipe, or the given sections: the first 16 hexadecimal digits of the SHA-256.

        The hash names finished runs, so it must not change between versions for recipes that train the same: the price
        is hashed as the paper's weight, later keys are left out at their past and present defaults, and removed keys
        count at theirs.
        """
        # Leave out later keys at their defaults
        data = self.model_dump(mode="json", include=set(sections) if sections else None)
        data = {key: value for key, value in data.items() if value not in _LATER.get(key, ())}
        for section, key in (("data", "mix"), ("branch", "extend")):
            if section in data and data[section][key] is None:
                del data[section][key]
        # Count removed keys at their defaults
        distill = data.get("branch", {}).get("distill")
        if distill is not None:
            distill["hidden"] = 0.0
        for section, removed in _REMOVED.items():
            if section in data:
                data[section] |= removed
        # Hash the version of mixed samples, and the price as the paper's weight
        if data.get("data", {}).get("mix") is not None:
            data["data"]["mix"]["samples_version"] = VERSION
        gates = data.get("gates")
        if gates is not None and gates["target_density"] is None:
            gates["density_weight"] = 0.0 - gates.pop("price")
        text = json.dumps(data, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_precision(self, dtype: str | None) -> "Recipe":
        """Return the recipe with ``precision`` set to ``dtype``, or unchanged if that is None.

        Raises ``UserError``: ``dtype`` is neither float32 nor bfloat16.
        """
        if dtype is None:
            return self
        if dtype not in ("float32", "bfloat16"):
            raise errors.UserError(f"--dtype {dtype}: training knows float32 and bfloat16")
        return self.model_copy(update={"precision": dtype})

    def resolve_precision(self, device: str) -> "Recipe":
        """Return the recipe with ``precision: auto`` resolved for ``device``, so that results record the precision."""
        return self.with_precision(training_precision(device)) if self.precision == "auto" else self

    def warnings(self) -> list[str]:
        """Return warnings, in sentences, about settings that will probably give poor results."""
        gates = self.gates
        branch = self.branch
        soft_steps = gates.soft_fraction * branch.steps
        # A logit moves by the sum of the predictor's learning rates; in 75 % of a cosine decay their mean is 0.63
        reach = 0.63 * gates.learning_rate_multiplier * branch.learning_rate * soft_steps
        distance = gates.bias - threshold_logit(gates.tau)
        if gates.start_from is None and gates.soft_fraction > 0 and reach < distance < math.inf:
            return [
                f"gates can hardly close: over {soft_steps:.0f} soft steps a logit travels about "
                f"{reach:.2f}, less than the {distance:.2f} from the bias to tau\n"
                "more branch.steps, a larger gates.learning_rate_multiplier or a smaller "
                "gates.bias would help"
            ]
        return []
