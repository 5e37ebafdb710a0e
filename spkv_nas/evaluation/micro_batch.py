"""Choose the micro-batch size in blocks, and refuse blocks that the model cannot read or its memory cannot hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spkv_nas.base import errors, progress
from spkv_nas.base.distributed import gathered
from spkv_nas.base.memory import require
from spkv_nas.cost.formulas import ROOM, PassMemory, largest_fit, logit_bytes
from spkv_nas.data.tokenizer import SeparateDocuments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from spkv_nas.data.blocks import TokenBlocks

BATCH_SIZE = 8  # micro-batch size in blocks, where memory allows


def check_positions(model: PreTrainedModel, length: int, option: str) -> None:
    """Check that a model can read sequences of ``length`` tokens, as ``option`` asks for; see ``check_length``."""
    from spkv_nas.model.model_shape import check_length

    check_length(model, length, f"give a smaller {option}")


def check_blocks(model: PreTrainedModel, blocks: TokenBlocks) -> None:
    """Check that there is text, and that a model can read its tokens and length; ``UserError`` if not."""
    from spkv_nas.model.cache_layers import mixes_documents
    from spkv_nas.model.model_shape import check_tokens

    if blocks.num_blocks == 0:
        raise errors.UserError("there is no text to measure the model on: the blocks are empty")
    check_tokens(model, blocks.largest_token)
    if isinstance(blocks.boundaries, SeparateDocuments) and mixes_documents(model):
        raise errors.UserError(
            f"{type(model).__name__} cannot keep documents of a block separate: "
            "use --documents joined (data.documents)"
        )
    check_positions(model, blocks.block_size, "block size")


def fitting_batch(
    model: PreTrainedModel, blocks: TokenBlocks, reporter: progress.Reporter = progress.SILENT
) -> int:
    """Return the micro-batch size, ``BATCH_SIZE`` or what fits in every rank's memory. Call on all ranks."""
    from spkv_nas.model import config_section, model_shape, weights

    # Find the largest batch that fits on every rank
    max_batch = min(BATCH_SIZE, blocks.num_blocks)
    length = blocks.block_size
    memory = PassMemory(
        model_shape.model_size(model), int(model.dtype.itemsize), config_section.gate_config(model)
    )
    room = ROOM * weights.memory_for_passes(model)
    fitting = min(
        gathered(
            max(1, largest_fit(max_batch, room, lambda number: memory.shared(number * length)))
        )
    )
    if fitting < max_batch:
        reporter.announce(
            f"using a micro-batch of {fitting} x {length:,} tokens, the most that fits in memory"
        )
    return fitting


def require_logits(model: PreTrainedModel, num_blocks: int, block_size: int) -> None:
    """Raise ``UserError`` unless a pass can be scored: twice its last hidden states and a chunk's logits must fit."""
    from spkv_nas.model.model_shape import vocabulary_size
    from spkv_nas.model.placement import input_device

    tokens = num_blocks * block_size
    item = int(model.dtype.itemsize)
    hidden = tokens * int(model.config.get_text_config().hidden_size) * item
    description = f"hidden states and logits of {num_blocks} x {block_size} tokens"
    size = 2 * hidden + logit_bytes(vocabulary_size(model), tokens, item=item)
    require(size, description, "give a smaller --context", device=input_device(model).type)
