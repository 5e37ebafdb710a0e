"""Who judges the layouts of a search: whatever scores them without training, and retrains them.

``spkv_nas.training.recipe_evaluator`` does so by a recipe; ``search`` itself trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.search_table import Retraining
from spkv_nas.artifacts.shape import Shape
from spkv_nas.evaluation.paired import PairedDifference, Score


class Evaluator(Protocol):
    """What a search asks for: changes of NLL by layouts.

    Scores count from the dense model as it is, retrained layouts from the control: full attention retrained alike.

    Held-out text is parted by document: scores and short retrainings are judged on the first documents, on which the
    search chooses, and full retrainings on the others, so that the winner's luck does not count.
    """

    @property
    def shape(self) -> Shape:
        """Of the model."""

    @property
    def identity(self) -> str:
        """Changes with the model's weights and with the text that the search chooses on."""

    @property
    def tokens_chosen_on(self) -> int:
        """Held-out tokens of the scores and of the short retrainings. Raises ``UserError``: there are too few."""

    @property
    def judged_on(self) -> NDArray[np.int64]:
        """Tokens of each held-out document of the full retrainings; the search sees no token of these documents."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the results come from, in plain values."""

    def steps(self, fidelity: Retraining) -> int:
        """Training steps of a retraining."""

    def score(
        self, layouts: Sequence[Layout], rivals: Sequence[Layout | None], finished: Sequence[Layout]
    ) -> list[Score]:
        """Change of NLL by each layout, without training. A layout that was scored before costs nothing.

        A layout that its rival leaves behind, one of ``finished``, may be stopped with an estimate, which must depend
        on the layout, its rival and ``finished`` alone.
        """

    def run_name(self, fidelity: Retraining, layout: Layout | None) -> str:
        """Changes with whatever decides the result of a retraining; None is full attention."""

    def retrain(self, fidelity: Retraining, layout: Layout | None) -> None:
        """Retrain a layout, or full attention, unless that is done; the judge keeps the result."""

    def control(self, fidelity: Retraining) -> PairedDifference:
        """Change of NLL of full attention retrained, against the dense model as it is; raises as ``retrained``."""

    def retrained(self, fidelity: Retraining, layouts: Sequence[Layout]) -> list[PairedDifference]:
        """Change of NLL by each layout against the control, all retrained. Raises ``UserError``: one is gone."""
