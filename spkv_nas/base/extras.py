"""Optional dependencies: which extra of spkv-nas provides which package, and the error if one is missing.

The core reads probes, proposes and compares. Code that needs more imports it as if it were installed; the command line
and ``spkv_nas.__getattr__`` convert the import error to a user-facing one with the functions here.
"""

from importlib.util import find_spec

from spkv_nas.base.errors import UserError

EXTRAS = {  # packages by extra; pyproject.toml has their versions
    "report": ("jinja2", "markupsafe", "matplotlib", "seaborn"),
    "train": (
        "accelerate",
        "datasets",
        "huggingface_hub",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
        "wonderwords",
    ),
    "lora": ("peft",),
    "search": ("optuna", "sqlalchemy"),
    "postgresql": ("psycopg",),
    "tasks": ("lm_eval",),
    "tensorboard": ("tensorboard",),
    "vllm": ("vllm",),
}


def missing_extra(error: ModuleNotFoundError) -> UserError | None:
    """Convert a failed import to a user-facing error; None if no extra provides the package."""
    for extra, packages in EXTRAS.items():
        if error.name in packages:
            return UserError(f"{error.name} is not installed\npip install 'spkv-nas[{extra}]' installs it")
    return None


def check_installed(package: str, key: str) -> None:
    """Raise ``UserError`` if a package that a recipe's ``key`` requires is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # not a plain folder of that name, as W&B creates
        extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
        requirement = package if extra is None else f"'spkv-nas[{extra}]'"
        raise UserError(f"{key}: {package} is not installed\npip install {requirement} installs it; or leave {key} out")
