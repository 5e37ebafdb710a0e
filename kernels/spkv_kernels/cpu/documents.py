"""Documents packed into one row: each is computed by itself, and those of the same length together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_by_document(
    attend: Callable[..., Tensor], starts: Tensor, inputs: Sequence[Tensor | None]
) -> Tensor:
    """Compute attention within documents.

    Args:
        attend: computes attention [N, H, S, D] from inputs of N documents of S tokens.
        starts: int [B, T], the position in its row at which each token's document starts.
        inputs: tensors [B, H, T, ...], or None.

    Returns:
        [B, H, T, D].
    """
    # Cut the rows, one after the other, into documents
    batch, length = starts.shape
    is_first = (starts == torch.arange(length, device=starts.device)).flatten()
    edges = [*is_first.nonzero().flatten().tolist(), batch * length]
    lengths = [stop - start for start, stop in itertools.pairwise(edges)]
    documents = [
        None if x is None else torch.split(x.transpose(0, 1).flatten(1, 2), lengths, 1)
        for x in inputs
    ]
    # Attend in those of each length
    outs: dict[int, Tensor] = {}
    for size in sorted(set(lengths)):
        members = [index for index, n in enumerate(lengths) if n == size]
        some = [
            None if parts is None else torch.stack([parts[index] for index in members])
            for parts in documents
        ]
        outs.update(zip(members, attend(*some).unbind(0), strict=True))
    # Put them back in order
    joined = torch.cat([outs[index] for index in range(len(lengths))], 1)
    return joined.view(len(joined), batch, length, -1).transpose(0, 1)
