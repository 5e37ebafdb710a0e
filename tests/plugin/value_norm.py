"""Define a signal: the mean norm of each KV head's values."""

from dataclasses import dataclass
from typing import Annotated

from spkv_nas.artifacts.kinds import SCORE
from spkv_nas.base.flag import Flag
from spkv_nas.probing.signals import Signal


@dataclass(frozen=True)
class ValueNorm(Signal):
    """Mean norm of the value vectors of a KV head."""

    name, help = "value-norm", "mean norm of a head's values"
    kind, unit = SCORE, "p-norm"

    order: Annotated[float, Flag("Order p of the norm.", low=1)] = 2.0

    def measure(self, model, blocks, window, *, name, batch_size=8, metadata=None, progress=None):
        """Measure the norms in one pass."""
        import torch

        from spkv_nas.data.batches import run_own_batches
        from spkv_nas.model.windows import full_attention
        from spkv_nas.probing.heads import HeadSums

        def run(_start, tokens):
            norms = []  # [B, Hkv, T] per layer

            def observe(q, k, v, scale, sink_logits):
                norms.append(v.float().norm(self.order, dim=-1))

            for state in states:
                state.observer = observe
            model.get_decoder()(**blocks.boundaries.inputs(tokens), use_cache=False)
            return norms

        def add(start, norms):
            sums.add(start, norms, slice(None))

        # The model is as before afterwards
        with torch.inference_mode(), full_attention(model) as states:
            sums = HeadSums(blocks, len(states), states[0].num_kv_heads, model.device)
            run_own_batches(run, add, blocks, batch_size, model.device, progress)
        sums.add_up()  # over the ranks of torchrun
        facts = {**(metadata or {}), "order": self.order}
        tokens = blocks.tokens.size
        means = sums.means()
        return self.table(means, window, passes=1.0, tokens=tokens, name=name, metadata=facts)
