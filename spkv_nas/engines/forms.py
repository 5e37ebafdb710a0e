"""Name the forms that ``export`` writes, and the outcomes that most of them have in an engine.

A form is a native architecture, such as ``ministral``, or a kind of layout of the type ``spkv``.
"""

from collections.abc import Sequence

from spkv_nas.engines.outcome import Cell, Outcome

EXACT = Cell(Outcome.EXACT)
REFUSED = Cell(Outcome.REFUSED)
UNTRIED = Cell(Outcome.UNTRIED)

# Forms of families that have a window in all but every n-th layer, by n; engines that ignore layer_types assume it
PERIODS = {"gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
OTHER_LAYERS = " with other layers"
NATIVE_FORMS = (
    "ministral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    f"gemma3_text{OTHER_LAYERS}",
    "olmo3",
    "smollm3",
    "cohere2",
    f"cohere2{OTHER_LAYERS}",
    "exaone4",
    "gpt_oss",
    f"gpt_oss{OTHER_LAYERS}",
    "granite_swa",
)
SPKV_FORMS = (
    "spkv",
    "spkv with a sink token",
    "spkv with several sink tokens",
    "spkv with both kinds of sinks",
    "spkv with more than 3 windows",
)
FORMS = (*NATIVE_FORMS, *SPKV_FORMS)


def form_name(model_type: str, layer_types: Sequence[str]) -> str:
    """Return the form of a native architecture: its model type, and whether its layers are not those of its family."""
    period = PERIODS.get(model_type)
    if period is None:
        return model_type
    for layer, kind in enumerate(layer_types):
        is_global_in_family = (layer + 1) % period == 0
        if (kind == "full_attention") != is_global_in_family:
            return f"{model_type}{OTHER_LAYERS}"
    return model_type
