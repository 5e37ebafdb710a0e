"""Define the protocol of evaluators: they score layouts without training, and retrain them.

``spkv_nas.training.recipe_evaluator`` implements it by a recipe; ``search`` itself trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import Fidelity, Retraining
from spkv_nas.artifacts.selection import Selection
from spkv_nas.artifacts.shape import Shape
from spkv_nas.evaluation.paired import PairedDifference


class Evaluator(Protocol):
    """Measures the change of NLL of layouts for a search.

    Scores without training are relative to the dense model; those of retrained layouts to the control, which is full
    attention retrained in the same way.

    Held-out text is split by document: scores and short retrainings use the first documents, on which the search
    selects, and full retrainings the others, so that selection does not bias their results.
    """

    @property
    def shape(self) -> Shape:
        """Return the shape of the model."""

    @property
    def identity(self) -> str:
        """Return an identifier that changes with the model's weights and with the selection text."""

    @property
    def num_selection_tokens(self) -> int:
        """Return the held-out tokens used for scores and short retrainings. Raises ``UserError`` if too few."""

    @property
    def num_selection_documents(self) -> int:
        """Return the number of held-out documents used for scores and short retrainings."""

    def documents(self, fidelity: Fidelity) -> Selection:
        """Return the documents that results of a fidelity are measured on."""

    @property
    def evaluation_tokens(self) -> NDArray[np.int64]:
        """Return the tokens per held-out document used for full retrainings; unseen by the search."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings that results depend on, as plain values."""

    def steps(self, fidelity: Retraining) -> int:
        """Return the number of training steps of a retraining."""

    def score(self, layouts: Sequence[Layout], baseline: Layout | None = None) -> list[PairedDifference]:
        """Return the change of NLL of each layout without training, against full attention or another; cached."""

    def alarm(self, changes: Sequence[PairedDifference]) -> str | None:
        """Return a sentence if changes of NLL without training make no sense (``evaluation.alarms``), else None."""

    def run_name(self, layout: Layout | None) -> str:
        """Return a name that changes with everything that determines a retraining; None is full attention."""

    def retrain(self, fidelity: Retraining, layout: Layout | None) -> None:
        """Retrain a layout, or full attention, unless done already, and keep the result."""

    def control(self, fidelity: Retraining) -> PairedDifference:
        """Return the change of NLL of retrained full attention against the dense model. Raises as ``retrained``."""

    def retrained(
        self, fidelity: Retraining, layouts: Sequence[Layout], baseline: Layout | None = None
    ) -> list[PairedDifference]:
        """Return the change of NLL of each retrained layout against the control, or another. Raises ``UserError``."""
