"""Keep the name of a model in memory from leading to a folder that holds another model.

Libraries load a model again by ``config._name_or_path`` or ``model.name_or_path``: TRL the reference policy of a
trainer, PEFT the base model of an adapter. Once a layout or gates were added or removed, the folder of this name would
be another model, without a word. The name then is one that nothing is loaded by, and that says what to do.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REMEDY = "changed by spkv_nas in memory: save it with spkv_nas.save, and load that folder"


def before_change(model: "PreTrainedModel") -> None:
    """Remember the name of a model, and the section ``spkv`` that its folder has, unless they are remembered."""
    vars(model).setdefault("_spkv_named", (model.name_or_path, _section(model)))


def after_change(model: "PreTrainedModel") -> None:
    """Give a model its own name if it is what its folder holds, else one that leads nowhere."""
    name, section = vars(model)["_spkv_named"]
    if section == _section(model):
        del model._spkv_named
    elif name:
        name = f"{name} {_REMEDY}"
    model.name_or_path = model.config._name_or_path = name


def folder_name(model: "PreTrainedModel") -> str:
    """Return the folder or id that a model was loaded from; "" if there is none."""
    name, _ = vars(model).get("_spkv_named", (model.name_or_path, None))
    return str(name)


def _section(model: "PreTrainedModel") -> object:
    """Return the section ``spkv`` of a model's config; None without one."""
    return getattr(model.config, "spkv", None)
