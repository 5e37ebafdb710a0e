"""Choose the model whose attention is measured or computed, of which only the sizes matter."""

from __future__ import annotations

from dataclasses import dataclass

from spkv_nas.artifacts.shape import Shape
from spkv_nas.base.errors import UserError
from spkv_nas.cost.ladder import find_level
from spkv_nas.stages.names import model_name
from spkv_nas.stages.options import REFERENCE


@dataclass(frozen=True)
class SizedModel:
    """Level of the ladder or model, described by its sizes; fields that a level lacks are those of ``ModelSize``.

    Attributes:
        name: name of its results.
        title: name to show to users.
        shape: shape of the model.
    """

    name: str
    title: str
    shape: Shape
    positions: int | None = None
    num_sliding: int = 0
    native_windows: tuple[int | None, ...] = ()
    is_mixture: bool = False

    @classmethod
    def of(cls, level: str | None, model: str | None) -> SizedModel:
        """Look up a level of the ladder, a model, or the embedded reference. Raises ``UserError`` for both at once."""
        if level is not None and model is not None:
            raise UserError("give a level of the ladder or --model, not both")
        if level is not None:
            return cls(level, level, find_level(level).shape)
        from spkv_nas.model.checkpoint import read_size

        source = model or REFERENCE
        size = read_size(source)
        sizes = (size.positions, size.num_sliding, size.native_windows, size.is_mixture)
        return cls(model_name(source), source, size.shape, *sizes)
