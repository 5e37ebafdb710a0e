"""Run the ``plan attention`` command; its docstring is the help."""

from __future__ import annotations

from spkv_nas.base.progress import Reporter
from spkv_nas.stages.plan.attention.options import AttentionOptions
from spkv_nas.stages.result import Result


def attention(options: AttentionOptions, reporter: Reporter) -> Result:
    """Compute KV-cache bytes, FLOPs and time per token of full attention, layouts, and SP-KV at a density.

    FLOPs follow Kaplan et al., 2 N + 2 L d_attn keys, averaged over the positions of a causal sequence. Times cover
    the attention of all layers, and are shown where spkv-nas calibrate measured this shape on this machine. With
    --engine, also the memory that the allocator of that serving engine plans for full attention and each layout.
    """
    from spkv_nas.stages.plan.attention import stage

    return Result(stage.attention(options, reporter), stage.show, stage.document)
