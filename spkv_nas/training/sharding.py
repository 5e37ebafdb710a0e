"""FSDP2 support: shard parameters, gradients and optimizer state across ranks.

Decoder layers are FSDP units, and so are predictors and learned sinks, because all parameters of a unit share one
dtype: these stay float32 while ``precision: bfloat16`` gathers everything else in bfloat16.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from spkv_nas.base.distributed import is_sharded, pass_device
from spkv_nas.data.batches import block_tokens, num_spare_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model import gates, loss, modes
from spkv_nas.model.learned_sinks import learned_sinks


def shard_added_modules(model: torch.nn.Module, plugin: Any, *, bfloat16: bool) -> None:
    """Make predictors and learned sinks FSDP units of accelerate's ``plugin``, and set the precision of the others."""
    if bfloat16:
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for module in (*gates.predictors(model).values(), *learned_sinks(model)):
        if not isinstance(module, FSDPModule):
            fully_shard(module, offload_policy=plugin.cpu_offload)


def shard_teacher(teacher: PreTrainedModel, plugin: Any) -> None:
    """Shard a frozen copy of the dense model as accelerate's ``plugin`` shards the model that learns from it.

    Embeddings and output matrix stay gathered from the decoder's pass until the loss is computed.
    """
    # Store weights in the dtype in which the student's are gathered
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    for parameter in teacher.parameters():
        parameter.data = parameter.data.to(policy.param_dtype or parameter.dtype)
    # Shard layers, inner ones first, then the rest
    offload = plugin.cpu_offload
    for layer in reversed(modes.decoder_layers(teacher)):
        fully_shard(layer, mp_policy=policy, offload_policy=offload)
    fully_shard(teacher, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)


@torch.inference_mode()
def spare_passes(model: PreTrainedModel, blocks: TokenBlocks, batch_size: int) -> None:
    """Run the dummy batches that this rank needs to stay in sync before evaluating ``blocks``.

    The forward pass of a sharded model is a collective operation, so all ranks must run the same number of batches.
    """
    with modes.evaluation_mode(model):
        for _ in range(num_spare_batches(blocks.num_blocks, batch_size)):
            tokens = block_tokens(blocks, 0, batch_size, pass_device(model))
            loss.token_nll(model, **blocks.boundaries.inputs(tokens))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that may be sharded; must be called on all ranks if it is."""
    result: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return result.detach()


def like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Convert an unsharded tensor to the device, dtype and sharding of ``parameter``."""
    tensor = tensor.to(parameter.device, parameter.dtype)
    if not isinstance(parameter, DTensor):
        return tensor
    sharded = distribute_tensor(
        tensor, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    return sharded.to(parameter.device)  # offloaded parameters are not on the device of their mesh


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Gather the state dict of a sharded model; must be called on all ranks.

    Returns:
        The state dict on the CPU of rank 0, an empty one on other ranks, or None if the model is not sharded.
    """
    if not is_sharded(model):
        return None
    # Gather on rank 0
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    # Make tied parameters share a tensor again, as each was gathered on its own
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if weights:
            weights[name] = weights[names.setdefault(parameter, name)]
    return weights
