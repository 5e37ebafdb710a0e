"""List the samplers of the layout search."""

from __future__ import annotations

from spkv_nas.base.registry import Registry
from spkv_nas.search.sampler import Sampler
from spkv_nas.search.samplers.random_search import RandomSearch
from spkv_nas.search.samplers.thompson import ThompsonSampling

SAMPLERS: Registry[Sampler] = Registry(
    "spkv_nas.samplers",
    "sampler",
    Sampler,  # type: ignore[type-abstract]
    (ThompsonSampling(), RandomSearch()),
)
