"""What only some commands need: which package comes with which extra of spkv-nas, and what to say where it is missing.

The base reads a probe, proposes and compares. Whoever needs more imports it as if it were there; the command line and
the package's face turn the error of the interpreter into one for people, here.
"""

from __future__ import annotations

from spkv_nas.base.errors import UserError

EXTRAS = {  # by what they are for; pyproject.toml has the versions
    "report": ("jinja2", "markupsafe", "matplotlib", "seaborn"),
    "train": ("accelerate", "datasets", "safetensors", "tokenizers", "torch", "transformers"),
    "search": ("optuna", "sqlalchemy"),
    "tensorboard": ("tensorboard",),
}


def missing_extra(error: ModuleNotFoundError) -> UserError | None:
    """What a failed import means to people; None if it is of no extra's package."""
    for extra, packages in EXTRAS.items():
        if error.name in packages:
            return UserError(f"{error.name} is not installed\npip install 'spkv-nas[{extra}]' brings it")
    return None
