"""Hold documents of a text out, so that what is measured on them did not choose what is measured."""

import hashlib
from collections import defaultdict

import numpy as np

from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks

HELD_OUT_TOKENS = 32_768  # of the documents that the ranking does not see
HELD_OUT_SHARE = 0.25  # of the text, at most


def hold_out(
    blocks: TokenBlocks, tokens: int = HELD_OUT_TOKENS, share: float | None = None
) -> tuple[TokenBlocks, TokenBlocks]:
    """Divide a text by documents into one to rank heads on and one to compare layouts on.

    Every domain with a document of at most half its text gives a part, so that a long document stays whole.

    Args:
        blocks: the text, which is packed again, with its documents in random order.
        tokens: length of the second text.
        share: share of the text whose documents it is taken from; None: as many as it needs, up to about a quarter.

    Raises ``UserError``: the documents that can be held out are shorter than a block.
    """
    if share is None:
        share = min(tokens / blocks.tokens.size, HELD_OUT_SHARE)
    held: dict[str, int] = {}  # tokens by text
    # Hold out documents of each domain
    lengths_by_domain = _lengths(blocks)
    for domain in blocks.domains:
        lengths = lengths_by_domain[domain]
        whole = sum(lengths.values())
        wanted = share * whole
        for text, length in lengths.items():
            # A longer one would leave too little to rank heads on
            if wanted > 0 and 2 * length <= whole:
                held[text] = length
                wanted -= length
    if sum(held.values()) < blocks.block_size:
        raise UserError(
            "layouts are compared on documents that ranked no head, "
            "but without the longest ones this text "
            f"leaves less than a block of {blocks.block_size} tokens: "
            "give more documents, or the window (--window)"
        )
    rest = blocks.in_random_order(0, held)
    held_out = blocks.in_random_order(0, blocks.text_ids - held.keys())
    return rest, held_out.spread(max(1, tokens // blocks.block_size))


def _lengths(blocks: TokenBlocks) -> dict[str, dict[str, int]]:
    """Return the tokens of each text, whose pieces stay together, by domain.

    Texts are in an order that does not depend on the rest of the text: that of their hashes.
    """
    indices, counts = np.unique(blocks.document, return_counts=True)
    tokens = dict(zip(indices.tolist(), counts.tolist(), strict=True))
    documents = [(index, info) for index, info in enumerate(blocks.documents) if index in tokens]
    documents.sort(key=lambda item: hashlib.sha256(item[1].text_id.encode()).digest())
    lengths: dict[str, dict[str, int]] = defaultdict(dict)
    for index, info in documents:
        of_domain = lengths[info.domain]
        of_domain[info.text_id] = of_domain.get(info.text_id, 0) + tokens[index]
    return lengths
