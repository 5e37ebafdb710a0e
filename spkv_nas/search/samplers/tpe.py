"""Sample layouts by Optuna's TPE, to compare other samplers with.

The tree-structured Parzen estimator (Bergstra et al. 2011) prefers heads that good layouts have more often than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spkv_nas.search.sampler import Sampler

if TYPE_CHECKING:
    from spkv_nas.artifacts.layout import Layout
    from spkv_nas.search.space import Space
    from spkv_nas.search.trials import Result


class TPE(Sampler):
    """Ask ``optuna.samplers.TPESampler`` for one categorical parameter per head, and meet budget and constraints.

    The layout of the space that contains most of the suggested heads is taken, others at random.
    """

    name = "tpe"
    help = "Optuna's TPE, without head scores"

    def layouts(
        self, space: Space, numbers: range, results: Sequence[Result], *, seed: int, starts: Sequence[Layout] = ()
    ) -> list[Layout]:
        """Return the layouts of a round; those of the first are random."""
        from optuna import create_study
        from optuna.distributions import CategoricalDistribution
        from optuna.samplers import TPESampler
        from optuna.trial import create_trial

        generators = [np.random.default_rng([seed, number]) for number in numbers]
        if not results:
            return [space.random(generator) for generator in generators]
        # Tell Optuna the results, one parameter per head
        letters = {str(head): CategoricalDistribution((False, True)) for head in range(space.table.num_heads)}
        sampler = TPESampler(seed=int(np.random.default_rng([seed, numbers.start]).integers(2**31)))
        study = create_study(directions=["minimize"] * len(results[0].values), sampler=sampler)
        masks = [space.layout(result.point).global_mask.ravel().tolist() for result in results]
        study.add_trials(
            [
                create_trial(params=dict(zip(letters, mask, strict=True)), distributions=letters, values=result.values)
                for mask, result in zip(masks, results, strict=True)
                if np.isfinite(result.values).all()
            ]
        )
        # Ask for the heads of each trial
        suggested = [np.array([*study.ask(letters).params.values()]).reshape(space.grid) for _ in numbers]
        return [space.random(generator, mask) for generator, mask in zip(generators, suggested, strict=True)]

    def settings(self, space: Space) -> dict[str, Any]:
        """Name the implementation, so that no study of another one is continued."""
        return {"sampler": "optuna.samplers.TPESampler"}
