"""Check ``probe.yaml``, which says where a table of head scores comes from."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from spkv_nas.base import limits, names, schema


class ProbeFile(schema.Section):
    """Content of ``probe.yaml``; other keys are kept as they are."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    tau: float = Field(default=0.5, ge=0, le=1)
    window: int | None = Field(default=None, ge=1, le=limits.MAX_WINDOW)
    sinks: int = Field(default=0, ge=0, le=limits.MAX_WINDOW)
    native_windows: list[Annotated[int, Field(ge=1, le=limits.MAX_WINDOW)] | None] | None = None
    head_dim: int | None = Field(default=None, ge=1, le=limits.MAX_SIZE)
    # by layer, where layers differ
    head_dims: list[Annotated[int, Field(ge=1, le=limits.MAX_SIZE)]] | None = None
    heads_per_layer: list[Annotated[int, Field(ge=1, le=limits.MAX_SIZE)]] | None = None
    dtype: str | None = None
    positions: int | None = Field(default=None, ge=1, le=limits.MAX_SIZE)
    kind: Literal["density", "share", "gain", "score"] | None = None
    unit: str | None = None
    target_density: float | None = Field(default=None, gt=0, lt=1)
    reached_density: float | None = Field(default=None, ge=0, le=1)
    mean_density: float | None = None
    price: float | None = None
    signal: str | None = None
    granularity: str | None = None
    budget: int | None = Field(default=None, ge=1)
    options: dict[str, Any] | None = None
    gains: dict[str, Any] | None = None
    selection: str | None = None
    inputs: str | None = None

    @field_validator("name")
    @classmethod
    def _can_name_a_file(cls, name: str | None) -> str | None:
        return name if name is None else names.check_name(name, "the probe")
