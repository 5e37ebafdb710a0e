"""What only some commands need: which package comes with which extra of spkv-nas, and what to say where it is missing.

The base reads a probe, proposes and compares. Whoever needs more imports it as if it were there; the command line and
the package's face turn the error of the interpreter into one for people, here.
"""

from __future__ import annotations

from importlib.util import find_spec

from spkv_nas.base.errors import UserError

EXTRAS = {  # by what they are for; pyproject.toml has the versions
    "report": ("jinja2", "markupsafe", "matplotlib", "seaborn"),
    "train": ("accelerate", "datasets", "safetensors", "tokenizers", "torch", "transformers", "wonderwords"),
    "lora": ("peft",),
    "search": ("optuna", "sqlalchemy"),
    "postgresql": ("psycopg",),
    "tasks": ("lm_eval",),
    "tensorboard": ("tensorboard",),
}


def missing_extra(error: ModuleNotFoundError) -> UserError | None:
    """What a failed import means to people; None if it is of no extra's package."""
    for extra, packages in EXTRAS.items():
        if error.name in packages:
            return UserError(f"{error.name} is not installed\npip install 'spkv-nas[{extra}]' brings it")
    return None


def check_installed(package: str, key: str) -> None:
    """Raise ``UserError`` if a package that a recipe's ``key`` asks for is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name, as W&B leaves behind, is no package
        extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
        wanted = package if extra is None else f"'spkv-nas[{extra}]'"
        raise UserError(f"{key}: {package} is not installed\npip install {wanted} brings it, or leave it out")
