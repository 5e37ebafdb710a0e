"""List the serving engines whose memory is planned: the built-in ones and those that installed packages add."""

from __future__ import annotations

from spkv_nas.base.registry import Registry
from spkv_nas.cost.engines.engine import Engine
from spkv_nas.cost.engines.llamacpp import LLAMACPP
from spkv_nas.cost.engines.sglang import SGLANG
from spkv_nas.cost.engines.vllm import VLLM

ENGINES: Registry[Engine] = Registry(
    "spkv_nas.engines",
    "engine",
    Engine,  # type: ignore[type-abstract]
    (VLLM, SGLANG, LLAMACPP),
)
