"""Entry point of the plug-in: register the model type and the model classes with vLLM."""

from spkv_nas.serving.vllm.config import architectures, prepare


def register() -> None:
    """Register configs and models of the type ``spkv``; vLLM calls it in each of its processes, maybe repeatedly.

    Nothing is imported from vLLM's models here, and no other checkpoint is affected. A version of vLLM that was not
    tested is refused only when a checkpoint with a layout is loaded.
    """
    from vllm import ModelRegistry

    from spkv_nas.model.custom_model_type import read_for_engine

    read_for_engine(prepare)
    for name in set(architectures()) - set(ModelRegistry.get_supported_archs()):
        ModelRegistry.register_model(name, f"spkv_nas.serving.vllm.models:{name}")
