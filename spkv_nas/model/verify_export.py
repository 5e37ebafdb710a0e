"""A fresh process in which plain transformers reads a model folder: does it compute what the hybrid here computes?

The folder is loaded there by ``plain_logits.py``, which this package is not imported into. Random tokens go through
both models in float32, ``BEYOND`` more of them than the window has keys, and the last logits are compared: those of one
pass, and of some steps with transformers' own key-value cache. That costs passes over so few tokens, for which the
weights are read from their files, the largest part of the model in float32, and the start of a process.
"""

from __future__ import annotations

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
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.memory import require
from spkv_nas.model.model_shape import vocabulary_size
from spkv_nas.model.modes import evaluation_mode
from spkv_nas.model.plain_logits import float32, parts

BEYOND = 64  # tokens that have keys outside the window
TOLERANCE = 1e-5  # of the largest logit
_STEPS = 8  # of these tokens are decoded one by one
_LEAST_SECONDS = 300.0
_SLOWER = 20.0  # times what it took here is the longest that we wait
_TEXT = "The 3 quick brown foxes' déjà-vu:\n\tfor i in range(10): x += 1.5e-3  # 你好, 🦊"


class LogitMismatch(Exception):  # noqa: N818  # not a mistake: another form is written
    """What plain transformers does otherwise, to end a sentence."""


@dataclass(frozen=True)
class ReferenceLogits:
    """What the hybrid in this process computes.

    Attributes:
        tokens: T of them.
        logits: float32 [keep, V], of the last tokens.
        token_ids: of a text; None without a tokenizer.
        seconds: that it took.
    """

    tokens: list[int]
    logits: Tensor
    token_ids: list[int] | None
    seconds: float


@dataclass(frozen=True)
class SubprocessResult:
    """What plain transformers said of a folder: logits float32 [keep, V] and token ids, or an error."""

    error: str | None
    logits: Tensor | None = None
    token_ids: list[int] | None = None


@torch.no_grad()
def expected(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, window: int) -> ReferenceLogits:
    """Run a hooked model over random tokens that reach beyond the window, or as far as the model's positions do.

    Raises:
        UserError: the largest part of the model would not fit into memory in float32.
    """
    began = time.monotonic()
    num_bytes = 4 * max(sum(parameter.numel() for parameter in part.parameters()) for part in parts(model))
    require(
        num_bytes, "comparing the export with plain transformers in float32", "export on a machine with more memory"
    )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    length = max(2 * _STEPS, min(window + BEYOND, longest))
    tokens = torch.randint(vocabulary_size(model), (1, length), generator=torch.Generator().manual_seed(0))
    with float32(model), evaluation_mode(model):
        given = tokens.to(model.device)
        logits = model(input_ids=given, use_cache=False, logits_to_keep=min(BEYOND, length)).logits[0].cpu()
    ids = None if tokenizer is None else tokenizer(_TEXT)["input_ids"]
    return ReferenceLogits(tokens[0].tolist(), logits, ids, time.monotonic() - began)


def check(folder: Path, hybrid: ReferenceLogits) -> float:
    """Compare a folder in a fresh process with the hybrid; the largest difference, as a share of the largest logit.

    Raises:
        LogitMismatch: plain transformers cannot load or run the folder, or computes something else.
        UserError: the process ended without an answer or took too long.
    """
    (answer,) = plain_answers({folder: hybrid})
    return compare(answer, hybrid)


def compare(answer: SubprocessResult, hybrid: ReferenceLogits) -> float:
    """As ``check``, of an answer that is there. Raises ``LogitMismatch``."""
    if answer.error is not None or answer.logits is None:
        raise LogitMismatch(f"plain transformers does not run it: {answer.error}")
    difference = float((answer.logits - hybrid.logits).abs().max() / hybrid.logits.abs().max())
    if not difference <= TOLERANCE:
        raise LogitMismatch(
            f"its logits in plain transformers differ by {difference:.2g} of the largest ({TOLERANCE:g} is allowed)"
        )
    if answer.token_ids != hybrid.token_ids:
        raise LogitMismatch("plain transformers makes other tokens of a text")
    return difference


def plain_answers(hybrids: dict[Path, ReferenceLogits]) -> list[SubprocessResult]:
    """Have one fresh process load folders and run each over its hybrid's tokens. Raises ``UserError`` as ``check``."""
    seconds = max(_LEAST_SECONDS, _SLOWER * sum(hybrid.seconds for hybrid in hybrids.values()))
    try:
        with tempfile.TemporaryDirectory() as place:
            return _ask(hybrids, Path(place), seconds)
    except OSError as error:
        raise UserError(
            f"the export could not be compared with plain transformers, so nothing was written: {first_line(error)}\n"
            f"make room in {tempfile.gettempdir()}, or choose another place with TMPDIR"
        ) from error


def _ask(hybrids: dict[Path, ReferenceLogits], place: Path, seconds: float) -> list[SubprocessResult]:
    """Requests and answers go through files in ``place``."""
    requests, answers = place / "requests.json", place / "answers.json"
    outputs = [place / f"{number}.safetensors" for number in range(len(hybrids))]
    asked = [
        {
            "folder": str(folder.resolve()), "tokens": hybrid.tokens, "keep": len(hybrid.logits), "steps": _STEPS,
            "text": "" if hybrid.token_ids is None else _TEXT, "logits": str(output),
        }
        for (folder, hybrid), output in zip(hybrids.items(), outputs, strict=True)
    ]  # fmt: skip
    requests.write_text(json.dumps(asked))
    _run_program([str(requests), str(answers)], place, seconds)
    return [
        SubprocessResult(found["error"], load_file(output)["logits"], found["token_ids"])
        if found["error"] is None
        else SubprocessResult(found["error"])
        for found, output in zip(json.loads(answers.read_text()), outputs, strict=True)
    ]


def _run_program(arguments: list[str], place: Path, seconds: float) -> None:
    """Run ``plain_logits.py``, from a folder where nothing can be imported by accident."""
    program = Path(__file__).with_name("plain_logits.py").read_text(encoding="utf-8")
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=place, env={**os.environ, **quiet},
            capture_output=True, text=True, errors="replace", timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"the export was not compared with plain transformers within {seconds:.0f} s, so nothing was written\n"
            "try again when the machine has less to do"
        ) from error
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"the export could not be compared with plain transformers, so nothing was written: its process ended with "
            f"{done.returncode} ({said})\nit needs memory for a layer in float32, and room for temporary files"
        )
