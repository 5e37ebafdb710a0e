"""Check in a subprocess that plain transformers reproduces the hybrid's logits from an exported folder.

Random tokens, ``BEYOND`` more than the window has keys, pass through both models in float32. The last logits are
compared: those of one pass, and those of some decoding steps with transformers' key-value cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from spkv_nas.base import errors, memory, progress
from spkv_nas.model import model_shape, modes
from spkv_nas.model.export import plain_logits, target

BEYOND = 64  # number of tokens with keys outside the window
TOLERANCE = 1e-5  # relative to the largest logit
_STEPS = 8  # number of these tokens to decode one by one
_MIN_SECONDS = 300.0
_SLOWER = 20.0  # time limit, as a multiple of the time taken here


@dataclass(frozen=True)
class ReferenceLogits:
    """Result of the hybrid in this process."""

    tokens: list[int]  # T input tokens
    logits: torch.Tensor  # float32 [keep, V], of the last tokens
    seconds: float  # duration of the run


@torch.no_grad()
def expected(model: PreTrainedModel, window: int) -> ReferenceLogits:
    """Run a hooked model over random tokens that reach beyond the window, or as far as its positions allow.

    Raises ``UserError``: the largest layer of the model does not fit into memory in float32.
    """
    # Check memory
    began = time.monotonic()
    part_sizes = [
        sum(parameter.numel() for parameter in part.parameters())
        for part in plain_logits.parts(model)
    ]
    memory.require(
        4 * max(part_sizes),
        "comparing the export with plain transformers in float32",
        "export on a machine with more memory",
    )
    # Draw tokens
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    length = max(2 * _STEPS, min(window + BEYOND, longest))
    generator = torch.Generator().manual_seed(0)
    vocabulary = model_shape.vocabulary_size(model)
    tokens = torch.randint(vocabulary, (1, length), generator=generator)
    # Run the model
    with plain_logits.float32(model), modes.evaluation_mode(model):
        inputs = tokens.to(model.device)
        output = model(input_ids=inputs, use_cache=False, logits_to_keep=min(BEYOND, length))
        logits = output.logits[0].cpu()
    return ReferenceLogits(tokens[0].tolist(), logits, time.monotonic() - began)


def agreement(hybrid: target.Hybrid, folder: Path) -> str:
    """Compare a folder with the hybrid, and return how well it agrees, as a clause; raises as ``check``."""
    progress.LOGGER.info("running the folder in plain transformers")
    reference = expected(hybrid.model, max([hybrid.layout.window, *hybrid.layout.windows.values()]))
    difference = check(folder, reference)
    return (
        f"over {len(reference.tokens)} tokens in a process of its own its logits are the hybrid's "
        f"to {difference:.0e} of the largest"
    )


def check(folder: Path, hybrid: ReferenceLogits) -> float:
    """Compare a folder in a subprocess with the hybrid, and return the largest difference, relative to the logits.

    Raises:
        TargetError: plain transformers cannot load or run the folder, or computes something else.
        UserError: the subprocess failed or took too long.
    """
    (answer,) = plain_answers({folder: hybrid})
    return compare(answer, hybrid)


def compare(answer: torch.Tensor | str, hybrid: ReferenceLogits) -> float:
    """Compare an answer of ``plain_answers`` with the hybrid, as ``check``. Raises ``TargetError``."""
    if isinstance(answer, str):
        raise target.TargetError(f"plain transformers does not run it: {answer}")
    difference = float((answer - hybrid.logits).abs().max() / hybrid.logits.abs().max())
    if not difference <= TOLERANCE:
        raise target.TargetError(
            f"its logits in plain transformers differ by {difference:.2g} of the largest "
            f"({TOLERANCE:g} is allowed)"
        )
    return difference


def plain_answers(hybrids: dict[Path, ReferenceLogits]) -> list[torch.Tensor | str]:
    """Run every folder over its hybrid's tokens in one subprocess; return logits [keep, V], or an error, of each."""
    seconds = max(_MIN_SECONDS, _SLOWER * sum(hybrid.seconds for hybrid in hybrids.values()))
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _ask(hybrids, Path(folder), seconds)
    except OSError as error:
        raise errors.UserError(
            "the export could not be compared with plain transformers, so nothing was written: "
            f"{errors.first_line(error)}\n"
            f"free disk space in {tempfile.gettempdir()}, or set TMPDIR to another folder"
        ) from error


def _ask(
    hybrids: dict[Path, ReferenceLogits], folder: Path, seconds: float
) -> list[torch.Tensor | str]:
    """Write requests to ``folder``, run the program, and read its answers."""
    # Write the requests
    requests = folder / "requests.json"
    answers = folder / "answers.json"
    outputs = [folder / f"{number}.safetensors" for number in range(len(hybrids))]
    request_list = [
        {
            "folder": str(model_folder.resolve()),
            "tokens": hybrid.tokens,
            "keep": len(hybrid.logits),
            "steps": _STEPS,
            "logits": str(output),
        }
        for (model_folder, hybrid), output in zip(hybrids.items(), outputs, strict=True)
    ]
    requests.write_text(json.dumps(request_list))
    # Run them and read the answers
    _run_program([str(requests), str(answers)], folder, seconds)
    return [
        load_file(output)["logits"] if answer["error"] is None else answer["error"]
        for answer, output in zip(json.loads(answers.read_text()), outputs, strict=True)
    ]


def _run_program(arguments: list[str], folder: Path, seconds: float) -> None:
    """Run ``plain_logits.py`` in ``folder``, where nothing can be imported by accident."""
    # Pass the program as text, so that its folder is not on the import path
    program = Path(__file__).with_name("plain_logits.py").read_text(encoding="utf-8")
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        # Where transformers copies a folder's code to
        "HF_MODULES_CACHE": str(folder / "modules"),
    }
    try:
        process = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise errors.UserError(
            f"the export was not compared with plain transformers within {seconds:.0f} s, "
            "so nothing was written\n"
            "try again when the machine is less busy"
        ) from error
    # Report why it failed
    if process.returncode != 0:
        message = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise errors.UserError(
            "the export could not be compared with plain transformers, so nothing was written: "
            f"its process ended with {process.returncode} ({message})\n"
            "it needs memory for one layer in float32, and disk space for temporary files"
        )
