"""Name the engines that exports are checked with; imports nothing heavy, because the command line lists them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """Program that runs an engine.

    Attributes:
        file: its text, beside this module.
        package: Python package of the engine.
        converts: whether users convert the exported folder for it first.
    """

    file: str
    package: str
    converts: bool = False


PROGRAMS = {
    "vllm": Program("run_vllm.py", "vllm"),
    "transformers": Program("run_transformers.py", "transformers"),
    "mlx": Program("run_mlx.py", "mlx_lm"),
    "llamacpp": Program("run_llamacpp.py", "llama_cpp", converts=True),
}
