"""Measure the effect of longer blocks during training (about ten minutes on one core).

Run ``python reports/extension.py``. Two branches of the embedded dense checkpoint are trained with full attention for
the same number of steps and tokens: one in blocks of 512 tokens throughout, one in blocks of 1,024 tokens from the
middle on, with RoPE's theta multiplied by four. Both are evaluated on held-out text in blocks of 1,024 tokens. Reported
is the change of NLL from the first to the second branch, paired by document, for each half of a block.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.console import say
from spkv_nas.base.schema import merged
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.nll import DocumentSums
from spkv_nas.evaluation.paired import DocumentNLL, paired_difference
from spkv_nas.model.checkpoint import load_on
from spkv_nas.model.loss import token_nll
from spkv_nas.training.branches import BranchContext
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant

LENGTH = 1024
EXTEND = {"at": 0.5, "block_size": LENGTH, "rope": {"rope_theta": 40000.0}}


@torch.inference_mode()
def halves(model: PreTrainedModel, blocks: TokenBlocks) -> list[DocumentNLL]:
    """Return the NLL by document of tokens in the first and in the second half of their block."""
    # Split the blocks; the second part starts one token early, as context of its first prediction
    half = blocks.block_size // 2
    half_blocks = [
        TokenBlocks(blocks.tokens[:, :half], blocks.document[:, :half], blocks.documents),
        TokenBlocks(blocks.tokens[:, half - 1 :], blocks.document[:, half - 1 :], blocks.documents),
    ]
    sums = [DocumentSums(part) for part in half_blocks]

    def add(start: int, losses: Tensor) -> None:
        """Add the NLL of a batch, split by half."""
        sums[0].add(start, losses[:, : half - 1])
        sums[1].add(start, losses[:, half - 1 :])

    run_own_batches(lambda _, tokens: token_nll(model, tokens), add, blocks, 4, model.device)
    return [part.result() for part in sums]


def main() -> None:
    """Train both branches and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/extension"))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rope", choices=("theta", "yarn"), default="theta")
    options = parser.parse_args()
    # Train both branches and evaluate them in long blocks
    data = Recipe.read(EMBEDDED / "recipe.yaml").model_dump(mode="json")
    rope = {"rope_type": "yarn"} if options.rope == "yarn" else EXTEND["rope"]
    nll_by_half = {}
    for name, extend in (("as it is", None), ("extended", {**EXTEND, "rope": rope})):
        recipe = Recipe(**merged(data, {"branch": {"steps": options.steps, "extend": extend}}))
        context = BranchContext.prepare(recipe, EMBEDDED, options.runs)
        branch = context.train(Variant.full_attention())
        model, _ = load_on(branch.checkpoint, "cpu")
        nll_by_half[name] = halves(model.eval(), context.corpus.heldout.cut(LENGTH))
        say(
            f"{name}: in blocks of 512 {branch.nll.mean:.4f}, in halves of 1,024 "
            + " and ".join(f"{part.mean:.4f}" for part in nll_by_half[name])
        )
    # Compare them by half
    for half, new, old in zip(("first", "second"), nll_by_half["extended"], nll_by_half["as it is"], strict=True):
        change = paired_difference(new, old)
        say(f"{half} half: {change.percent:+.3f} % ± {change.standard_error:.3f}")


if __name__ == "__main__":
    main()
