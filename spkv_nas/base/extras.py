"""Optional dependencies: which extra provides which package, the error if one is missing, and actions on an import.

The core reads probes, proposes and compares. Code that needs more imports it as if it were installed; the command line
and ``spkv_nas.__getattr__`` convert the import error to a user-facing one with the functions here.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from spkv_nas.base.errors import UserError

# Packages by extra; pyproject.toml has their versions
EXTRAS = {
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
    "answers": ("jsonschema",),
    "gguf": ("gguf",),
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
            return UserError(
                f"{error.name} is not installed\npip install 'spkv-nas[{extra}]' installs it"
            )
    return None


def check_installed(package: str, key: str) -> None:
    """Raise ``UserError`` if a package that a recipe's ``key`` requires is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # not a plain folder of that name, as W&B creates
        extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
        requirement = package if extra is None else f"'spkv-nas[{extra}]'"
        raise UserError(
            f"{key}: {package} is not installed\n"
            f"pip install {requirement} installs it; or leave {key} out"
        )


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Call ``action`` once: now if ``module`` is imported already, else right after its import."""
    if module in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watch(module, action))


class _Watch(MetaPathFinder):
    """Import finder that finds no module, but wraps the loader of ``module`` to call ``action`` afterwards."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module = module
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the other finders find the module, and wrap its loader."""
        if fullname != self.module or self not in sys.meta_path:
            return None
        # Find the module without this finder, which would recurse
        sys.meta_path.remove(self)
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        # Run the action once the loader has executed the module
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.action()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
