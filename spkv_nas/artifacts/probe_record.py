"""Record of a probe, ``probe.yaml``: what head scores were measured on, how, and what was found with them.

Commands read it by the fields of ``ProbeRecord``. Other entries, which signals and installed packages add, are only
shown on the page and written again.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from spkv_nas.artifacts.prediction_check import PredictionCheck
from spkv_nas.artifacts.tried_layouts import TriedLayout
from spkv_nas.base import limits, names, schema

Window = Annotated[int, Field(ge=1, le=limits.MAX_WINDOW)]
Size = Annotated[int, Field(ge=1, le=limits.MAX_SIZE)]


class GainsRecord(schema.Recorded):
    """Say on how much text the gains of single heads were measured."""

    model_config = ConfigDict(extra="allow")

    documents: int | None = None  # None: not recorded


class MassiveActivation(schema.Recorded):
    """Largest hidden state of a decoder layer's output."""

    layer: int  # index of the decoder layer, of those with attention
    ratio: float  # its magnitude, as a multiple of the median magnitude in this layer
    channel: int  # index of its channel
    position: int  # position of its token in the block


class ProbeRecord(schema.Section):
    """Content of ``probe.yaml``; entries of other names are kept as they are.

    Example::

        record = ProbeRecord.of({"signal": "duo", "kind": "share", "sinks": 4, "steps": 100})
        record.sinks  # 4
        record.entries()["steps"]  # 100, which no command reads
    """

    model_config = ConfigDict(extra="allow")

    # The scores
    name: str | None = None
    signal: str | None = None
    kind: Literal["density", "share", "gain", "score"] | None = None
    unit: str | None = None
    granularity: str | None = None  # what was measured together: "head", "layer" or "mixed"
    tau: float = Field(default=0.5, ge=0, le=1)
    window: Window | None = None
    sinks: int = Field(default=0, ge=0, le=limits.MAX_WINDOW)  # first tokens a local head sees
    # The model
    model: str | None = None
    source: str | None = None  # where proposed layouts come from
    dtype: str | None = None
    head_dim: Size | None = None
    head_dims: list[Size] | None = None  # by layer, where layers differ
    heads_per_layer: list[Size] | None = None  # where layers differ
    native_windows: list[Window | None] | None = None  # by layer; None: no layer has one
    positions: Size | None = None  # the model's context in tokens
    # The text
    block_size: int | None = None
    separator: dict[str, object] | None = None  # ``SeparatorReport.as_mapping``
    selection: str | None = None  # digest of the documents that the heads were scored on
    alarm: str | None = None  # why measurements make no sense
    nll: float | None = None  # of the unchanged model, in nats per token
    # The gates that were learned
    training: str | None = None
    training_steps: int | None = None
    price: float | None = None  # sparsity penalty lambda
    target_density: float | None = Field(default=None, gt=0, lt=1)
    reached_density: float | None = Field(default=None, ge=0, le=1)
    mean_density: float | None = None
    # The budget that the scores were measured for, and the layouts that were compared within it
    budget: int | None = Field(default=None, ge=1)  # global heads
    memory: float | None = None  # share of full attention's KV cache
    context: int | None = None  # tokens of a sequence whose KV cache is counted
    # ``TriedLayout.as_mapping`` of each
    layouts_tried: list[dict[str, object]] = Field(default_factory=list)
    recommended: str | None = None  # name of one of them
    # How far the scores can be trusted
    gains: GainsRecord | None = None
    prediction_check: dict[str, object] | None = None  # ``PredictionCheck.as_mapping``
    head_gates: list[list[Annotated[float, Field(ge=0, le=1)]]] | None = None  # by layer
    # Attention on the first tokens: shares of it, and heads that give the first four much of it
    sink_mass: float | None = None
    sink_tokens_mass: float | None = None
    sink_heads: int | None = None
    measured_heads: int | None = None
    massive_activation: MassiveActivation | None = None
    # The command
    options: dict[str, object] | None = None  # those not at their defaults
    environment: dict[str, object] | None = None
    inputs: str | None = None  # hash of all that the scores depend on

    @field_validator("name")
    @classmethod
    def _can_name_a_file(cls, name: str | None) -> str | None:
        return name if name is None else names.check_name(name, "the probe")

    @classmethod
    def of(cls, entries: Mapping[str, object], where: str = "head scores") -> "ProbeRecord":
        """Return a record of ``entries``; ``UserError``, naming ``where``, if one has another type or range."""
        return schema.validate(cls, dict(entries), where)

    def entries(self) -> dict[str, object]:
        """Return the entries that were set, by name, in the order of the fields."""
        return self.model_dump(exclude_unset=True)

    def with_entries(self, **changes: object) -> "ProbeRecord":
        """Return the record with other entries; errors as ``of``."""
        return self.of({**self.entries(), **changes})

    def without(self, *fields: str) -> "ProbeRecord":
        """Return the record without some entries."""
        return self.of({key: value for key, value in self.entries().items() if key not in fields})

    @property
    def model_name(self) -> str | None:
        """Return a name that all probes of one model share; None for a table made by hand."""
        named = (self.options or {}).get("model") or self.model
        return None if named is None else str(named)

    @property
    def measured_context(self) -> int | None:
        """Return the tokens of a sequence whose KV cache is counted: as many as were measured at once, if known.

        That is the context that the probe was measured for, or the length of its blocks; in tables of earlier versions
        the model's context. None: none of these is recorded.
        """
        for length in (self.context, self.block_size, self.positions):
            if length is not None:
                return length
        return None

    @property
    def tried(self) -> list[TriedLayout]:
        """Return the layouts that were compared, best first; empty if none were."""
        return [TriedLayout.parse(row) for row in self.layouts_tried]

    @property
    def check(self) -> PredictionCheck | None:
        """Return how well costs of windows predict losses; None if that was not checked."""
        if self.prediction_check is None:
            return None
        return PredictionCheck.parse(self.prediction_check)
