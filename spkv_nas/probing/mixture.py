"""Mix global and local attention by head: the attention of signals that learn how much of each a head needs.

    out_h = share_h global_h + (1 - share_h) local_h,   0 <= share_h <= 1

With shares of 0 and 1 this is the attention of a layout.
"""

from __future__ import annotations

from spkv_kernels import attention
from torch import Tensor

from spkv_nas.artifacts.local_layers import layout_window, takes_sinks
from spkv_nas.model.attention import GLOBAL_WINDOW, LayerState


class Mixture:
    """Attention observer of one layer.

    Attributes:
        share: float [Hkv], share of global attention by KV head.
    """

    def __init__(self, share: Tensor, *, window: int, sinks: int = 0, global_window: int = GLOBAL_WINDOW) -> None:
        """Mix with ``share``.

        Args:
            share: float [Hkv]; the output has the wider dtype of ``share`` and the queries.
            window: number of recent keys that local attention sees, including the query's own key.
            sinks: number of first tokens that local attention sees as well.
            global_window: the same as ``window`` for global attention.
        """
        self.share, self._sinks = share, sinks
        self._window, self._global_window = min(window, global_window), global_window

    @classmethod
    def of(cls, state: LayerState, share: Tensor, window: int, sinks: int) -> Mixture:
        """Mix in one layer what a global and a local head of a layout see there (``local_layers.py``)."""
        local, whole = (layout_window(state, window, is_global=is_global) for is_global in (False, True))
        return cls(share, window=local, sinks=sinks if takes_sinks(state, local) else 0, global_window=whole)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None = None) -> Tensor:
        """Compute the attention output [B, Hq, T, D].

        Args:
            q: [B, Hq, T, D].
            k: [B, Hkv, T, D].
            v: [B, Hkv, T, D].
            scale: scale of the scores.
            sink_logits: learned sinks [Hq] of the model, or None.
        """
        q, k, v = (x.contiguous() for x in (q, k, v))  # one copy for both
        return self.mix(
            *(attend(q, k, v, scale, sink_logits) for attend in (self.global_attention, self.local_attention))
        )

    def mix(self, global_output: Tensor, local_output: Tensor) -> Tensor:
        """Mix two attention outputs [B, Hq, T, D] by the share of each query head's KV head."""
        groups = global_output.shape[1] // len(self.share)
        share = self.share.to(global_output.device).repeat_interleave(groups)[:, None, None]
        return share * global_output + (1.0 - share) * local_output

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None) -> Tensor:
        """Compute global attention; shapes as in ``__call__``."""
        return attention(q, k, v, window=self._global_window, sink_logits=sink_logits, scale=scale)

    def local_attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None) -> Tensor:
        """Compute local attention; shapes as in ``__call__``."""
        return attention(q, k, v, window=self._window, sinks=self._sinks, sink_logits=sink_logits, scale=scale)
