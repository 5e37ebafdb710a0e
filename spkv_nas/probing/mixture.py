"""Mix kinds of attention by head: the attention of signals that measure how much of each a head needs.

    out_h = sum_k share_hk out_hk,   kinds: local attention with one window or several, and global attention

With shares of 0 and 1 this is the attention of a layout.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from spkv_kernels import attention
from torch import Tensor

from spkv_nas.artifacts.local_layers import layout_window, takes_sinks
from spkv_nas.model.attention import LayerState


class Mixture:
    """Attention observer of one layer."""

    replaces = True  # attention, also in layers that read the keys of this one
    knows_documents = True  # takes ``starts``

    def __init__(self, state: LayerState, shares: Tensor, windows: Sequence[int], sinks: int) -> None:
        """Mix what local heads of a layout see in a layer with each of ``windows`` and ``sinks``, and a global head."""
        self._state = state
        reaches = [layout_window(state, window, is_global=False) for window in windows]
        self._kinds = [(reach, sinks if takes_sinks(state, reach) else 0) for reach in reaches]
        self._kinds.append((state.checkpoint_window, 0))
        self.shares = shares  # float [Hkv, K] or [B, Hkv, K], share of each kind by KV head, of global attention last

    @classmethod
    def of_global(cls, state: LayerState, share: Tensor, window: int, sinks: int) -> "Mixture":
        """Mix local attention with one window with a ``share`` [Hkv] of global attention."""
        return cls(state, torch.stack([1.0 - share, share], -1), [window], sinks)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None, starts: Tensor | None = None
    ) -> Tensor:
        """Compute the attention output [B, Hq, T, D], in the wider dtype of the shares and the queries.

        q is [B, Hq, T, D], k and v are [B, Hkv, T, D], ``sink_logits`` are the model's learned sinks [Hq], and
        ``starts`` the position at which each token's document starts, int [B, T].
        """
        q, k, v = (x.contiguous() for x in (q, k, v))  # one copy for all kinds
        return self.mix(self.attend(kind, q, k, v, scale, sink_logits, starts) for kind in range(len(self._kinds)))

    def attend(self, kind: int, q: Tensor, k: Tensor, v: Tensor, scale: float, *options: Tensor | None) -> Tensor:
        """Compute one kind of attention; -1 is global. Shapes and ``options`` as in ``__call__``."""
        window, sinks = self._kinds[kind]
        shown: dict[str, Any] = dict(zip(("sink_logits", "starts"), options, strict=True))
        return attention(q, k, v, window=window, sinks=sinks, scale=scale, softcap=self._state.softcap, **shown)

    def mix(self, outputs: Iterable[Tensor]) -> Tensor:
        """Mix the attention outputs of all kinds, each [B, Hq, T, D], by the shares of each query head's KV head."""
        mixed = torch.zeros(())
        for kind, output in enumerate(outputs):
            share = self.shares[..., kind].to(output.device)
            by_query = share.repeat_interleave(output.shape[1] // share.shape[-1], -1)
            mixed = mixed.to(output.device) + by_query[..., None, None] * output
        return mixed
