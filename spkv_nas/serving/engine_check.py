"""Check that an inference engine computes what the model does, by running the engine on the exported folder.

The engine runs as a program (``engines/programs/``) in its own environment, whose Python may be another one. It
gets random tokens that reach beyond all windows, generates greedily, and gives the log-probability of every token, in
float32. This package then runs the model once over the same tokens, with the layout, and once without, which must fail
the comparison: otherwise the tokens do not show the windows, and the check proves nothing.
If the engine differs, layers are tried one by one to say which one it runs with other windows.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from spkv_nas.artifacts.gate_config import GLOBAL, LOCAL
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.local_layers import takes_sinks
from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import StrPath
from spkv_nas.engines.engine import PROGRAMS, Program
from spkv_nas.engines.registry import ENGINES, checked_engines
from spkv_nas.model import checkpoint, config_section, custom_model_type, model_shape, modes
from spkv_nas.model.attention import GLOBAL_WINDOW, LayerState, layer_states
from spkv_nas.model.export.plain_logits import float32
from spkv_nas.model.windows import apply_layout, layout_windows

TOLERANCE = 1e-3  # nats; engines agree to about 1e-5 in float32
CONCLUSIVE = 10 * TOLERANCE  # difference that full attention must make at least
_BEYOND = 128  # tokens of the prompt beyond the window
_STEPS = 64  # tokens to generate
_SECONDS = 3600.0
_NO_LIMIT = 1 << 30  # positions of a model that states no maximum
_MAIN = PROGRAMS / "main.py"  # which every program begins with

Windows = tuple[tuple[int, ...], ...]  # of the heads, by layer


@dataclass(frozen=True)
class EngineCheck:
    """Comparison of an engine with the model."""

    engine: str  # name and version of the engine
    # What local heads see, such as "windows L 128, M 512", whose letters ``findings`` uses
    reach: str
    num_prompt: int  # tokens of the prompt
    num_new: int  # tokens that were generated
    num_equal: int  # how many of them, from the first, are those that the model prefers
    difference: float  # largest difference of a token's log-probability from the model's, in nats
    # The same for the model without the layout: with the windows of the dense checkpoint, or none if those are the
    # layout's
    dense_difference: float
    # The same for local heads without sink tokens; None for a layout that has none
    sink_difference: float | None
    cache: Sequence[str]  # the engine's report of its cache, by line, if its program gives one
    findings: Sequence[str]  # what the engine runs instead, by line; empty if it agrees

    @property
    def is_conclusive(self) -> bool:
        """Return whether the model without the layout, or without its sink tokens, fails the comparison."""
        differences = (self.dense_difference, self.sink_difference)
        return min(difference for difference in differences if difference is not None) >= CONCLUSIVE

    @property
    def passed(self) -> bool:
        """Return whether the engine computes what the model does, and the check could have shown otherwise."""
        return (
            self.is_conclusive and self.difference <= TOLERANCE and self.num_equal == self.num_new
        )

    def __str__(self) -> str:
        """Return the verdict, both comparisons, what the engine runs instead, and its cache, by line."""
        if not self.is_conclusive:
            verdict = "the check proves nothing"
        elif self.passed:
            verdict = "computes what the model does"
        else:
            verdict = "computes something else"
        lines = [
            f"{self.engine}: {verdict}",
            f"{self.num_prompt} prompt tokens, {self.reach}: {self.num_equal} of {self.num_new} "
            f"greedy tokens equal, log-probabilities within {self.difference:.2g} nats",
            _would_show("the layout", self.dense_difference),
        ]
        if self.sink_difference is not None:
            lines.append(_would_show("sink tokens", self.sink_difference))
        lines += self.findings
        lines += [f"cache: {line}" for line in self.cache]
        return "\n".join(lines)


def _would_show(name: str, difference: float) -> str:
    """Say whether the check would show that the engine does not run a part of the layout."""
    would = f"less than {CONCLUSIVE:g}, so it would not show"
    if difference >= CONCLUSIVE:
        would = "so it would show"
    return f"without {name} they differ by {difference:.2g} nats, {would}"


def compare_with_engine(
    folder: Path,
    engine: str,
    *,
    layout: Layout | None = None,
    num_prompt: int | None = None,
    python: StrPath | None = None,
) -> EngineCheck:
    """Run an engine on an exported folder, and compare it with the model that this package computes from its weights.

    The engine must run ``layout``, by default that of the folder, on ``num_prompt`` tokens: more than the widest
    window, by default 128 more than any window of the model. ``python`` is the Python of the engine's environment;
    None: this one. Raises ``UserError``: the folder has no layout, the prompt fits in its window or is too long, or the
    engine is not installed, refuses the folder or does not finish.
    """
    # Apply the layout to the model
    model, _ = checkpoint.load(folder)
    saved = config_section.checkpoint_layout(model)
    folder_layout = saved or native_layout(model.config)
    expected = layout or folder_layout
    if expected is None:
        raise UserError(
            f"{folder} has no layout to check\ngive the one that it should have with --layout"
        )
    if saved is None or saved.content_hash != expected.content_hash:
        apply_layout(model, expected)
    # Ask the engine
    prompt = _prompt(model, max(expected.legend.values()), num_prompt)
    answer = _ask(folder, engine, prompt, python)
    new_tokens = answer["tokens"]
    engine_logprobs = torch.tensor(answer["logprobs"])
    # Compare it with the model, and with the model without the layout
    tokens = torch.tensor([[*prompt, *new_tokens]])
    reference = _Reference(model, expected, tokens, is_native=saved is None)
    with float32(model), modes.evaluation_mode(model):
        logprobs, preferred = reference.run(reference.windows)
        difference = _largest(engine_logprobs - logprobs)
        dense_logprobs, _ = reference.run(reference.without_layout)
        sink_difference = None
        if reference.has_sinks:
            sinkless_logprobs, _ = reference.run(reference.windows, sinks=0)
            sink_difference = _largest(sinkless_logprobs - logprobs)
        is_equal = (torch.tensor(new_tokens) == preferred[len(prompt) - 1 :]).int()
        agrees = difference <= TOLERANCE and bool(is_equal.all())
        findings = [] if agrees else _findings(reference, engine_logprobs, folder_layout)
    return EngineCheck(
        engine=answer["version"],
        reach=expected.reach,
        num_prompt=len(prompt),
        num_new=len(new_tokens),
        num_equal=int(is_equal.cumprod(0).sum()),
        difference=difference,
        dense_difference=_largest(dense_logprobs - logprobs),
        sink_difference=sink_difference,
        cache=answer["cache"],
        findings=findings,
    )


def native_layout(config: PreTrainedConfig) -> Layout | None:
    """Return the layout in the ``layer_types`` of a native form; None if no layer slides."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    window = getattr(text, "sliding_window", None)
    if "sliding_attention" not in kinds or not window:
        return None
    rows = []
    for kind, num_heads in zip(
        kinds, model_shape.config_shape(config).heads_per_layer, strict=True
    ):
        letter = LOCAL if kind == "sliding_attention" else GLOBAL
        rows.append(letter * num_heads)
    return Layout(tuple(rows), int(window))


class _Reference:
    """Model that computes log-probabilities of fixed tokens with any windows."""

    def __init__(
        self, model: PreTrainedModel, layout: Layout, tokens: torch.Tensor, *, is_native: bool
    ) -> None:
        """Store the model with its layout applied, and the tokens [1, T].

        The windows in the config of a native form are a layout's, and limit no other layout, as those of a dense
        checkpoint would.
        """
        self.model = model
        self.layout = layout
        self.tokens = tokens
        self.is_native = is_native
        self.states: list[LayerState] = layer_states(model)
        self.learned = [state.learned_sinks for state in self.states]
        self.windows: Windows = tuple(state.head_windows(gated=False) for state in self.states)
        if is_native:
            self.windows = tuple(
                tuple(window or GLOBAL_WINDOW for window in row) for row in layout.head_windows
            )
            for state in self.states:
                state.native_window = None
                state.is_always_local = False
        self.has_sinks = layout.sinks > 0 and any(
            _row_takes_sinks(state, row)
            for state, row in zip(self.states, self.windows, strict=True)
        )

    @property
    def without_layout(self) -> Windows:
        """Return the windows of the dense checkpoint; full attention if unknown, or if they are the layout's."""
        if self.is_native:
            return self.full_attention
        native = tuple((state.checkpoint_window,) * state.num_kv_heads for state in self.states)
        return self.full_attention if native == self.windows else native

    @property
    def full_attention(self) -> Windows:
        """Return windows with which every head sees all keys."""
        return tuple((GLOBAL_WINDOW,) * len(row) for row in self.windows)

    def whole(self, layer: int) -> int:
        """Return how many keys a global head of a layer sees; in layers that are local by design, all keys."""
        state = self.states[layer]
        return GLOBAL_WINDOW if state.is_always_local else state.checkpoint_window

    def alternatives(self, layer: int) -> list[tuple[int, ...]]:
        """Return the windows of a layer whose heads are all of one kind, or of which one is of another kind."""
        row = self.windows[layer]
        kinds = [*self.layout.legend.values(), self.whole(layer)]
        rows = {(kind,) * len(row) for kind in kinds}
        for head in range(len(row)):
            rows |= {(*row[:head], kind, *row[head + 1 :]) for kind in kinds}
        return sorted(rows)

    def describe(self, changed: Windows) -> list[str]:
        """Describe each layer whose windows differ from the layout's, by the letters of its heads."""
        lines = []
        for layer, (expected, other) in enumerate(zip(self.windows, changed, strict=True)):
            if other != expected:
                runs = self._letters(layer, other)
                should_run = self._letters(layer, expected)
                lines.append(f"layer {layer}: the engine runs {runs} instead of {should_run}")
        return lines

    def _letters(self, layer: int, row: tuple[int, ...]) -> str:
        """Return the letters of a layer's windows; one that the layout does not have stands in brackets."""
        letter_of = {window: letter for letter, window in self.layout.legend.items()}
        letters = []
        for window in row:
            if window >= self.whole(layer):
                letters.append(GLOBAL)
            else:
                letters.append(letter_of.get(window, f"[{window}]"))
        return "".join(letters)

    @torch.no_grad()
    def run(self, windows: Windows, sinks: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probability of each token after the first, and the likeliest tokens there: [T - 1] each.

        Without ``sinks``, local heads see those of the layout.
        """
        if sinks is None:
            sinks = self.layout.sinks
        for state, row, learned in zip(self.states, windows, self.learned, strict=True):
            state.set_windows(row, sinks)
            state.learned_sinks = learned and _row_takes_sinks(state, row)
        output = self.model(input_ids=self.tokens.to(self.model.device), use_cache=False)
        logits = output.logits[0, :-1].float().cpu()
        next_tokens = self.tokens[0, 1:, None]
        logprobs = logits.log_softmax(-1).gather(1, next_tokens)[:, 0]
        return logprobs, logits.argmax(-1)


def _row_takes_sinks(state: LayerState, row: tuple[int, ...]) -> bool:
    """Return whether any head of a layer with these windows gets sink tokens or learned sinks."""
    return any(takes_sinks(state, window) for window in row)


def _findings(
    reference: _Reference, logprobs: torch.Tensor, folder_layout: Layout | None
) -> list[str]:
    """Say which layers the engine runs with other windows, by running the model with them."""
    windows = reference.windows

    def explains(changed: Windows, sinks: int | None = None) -> bool:
        """Return whether the model with other windows, or sink tokens, computes what the engine does."""
        if changed == windows and sinks is None:
            return False
        changed_logprobs, _ = reference.run(changed, sinks)
        return _largest(changed_logprobs - logprobs) <= TOLERANCE

    # What the folder says, no windows at all, and no sink tokens
    if folder_layout is not None:
        of_folder = tuple(layout_windows(reference.model, folder_layout))
        if explains(of_folder):
            lines = reference.describe(of_folder)
            return [f"{line}, as the folder's config says" for line in lines]
    if explains(reference.without_layout):
        return ["the engine runs the dense checkpoint in every layer"]
    if explains(reference.full_attention):
        return ["the engine runs no windows in every layer"]
    if reference.has_sinks and explains(windows, sinks=0):
        return ["the engine runs local heads without the sink tokens"]
    # Other windows in one layer
    for layer in range(len(windows)):
        for other in reference.alternatives(layer):
            changed = (*windows[:layer], other, *windows[layer + 1 :])
            if explains(changed):
                return reference.describe(changed)
    return ["no change of the windows of one layer explains the difference"]


def _prompt(model: PreTrainedModel, window: int, length: int | None) -> list[int]:
    """Draw random tokens: as many as ``length``, or by default beyond all windows as far as positions allow."""
    # Choose a length beyond all windows
    text_config = model.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or _NO_LIMIT
    widest = window
    for state in layer_states(model):
        finite = [size for size in state.head_windows(gated=False) if size < GLOBAL_WINDOW]
        widest = max([widest, *finite])
    length = length or min(widest + _BEYOND, positions - _STEPS)
    if not window < length <= positions - _STEPS:
        raise UserError(
            f"a prompt of {length:,} tokens: it must be longer than the window of {window}, and "
            f"at most {positions - _STEPS:,} tokens, so that {_STEPS} new ones fit in the model's "
            f"{positions:,} positions; within the window full attention computes the same, so "
            "that a check proves nothing\n"
            "choose another --prompt-tokens"
        )
    # Draw the tokens
    generator = torch.Generator().manual_seed(0)
    vocabulary_size = model_shape.vocabulary_size(model)
    tokens: list[int] = torch.randint(vocabulary_size, (length,), generator=generator).tolist()
    return tokens


def _ask(folder: Path, engine: str, prompt: list[int], python: StrPath | None) -> dict[str, Any]:
    """Run the engine's program, and return its answer; ``UserError`` if there is none.

    The answer has the engine's version, greedy tokens, logprobs of all tokens but the first, and its cache by line.
    """
    # Check that the engine can run, with an absolute path because it runs in another working folder
    python = sys.executable if python is None else os.path.abspath(python)
    program = ENGINES[engine].program
    if program is None:
        raise UserError(
            f"{engine} has no check program; expected one of {', '.join(checked_engines())}"
        )
    if python == sys.executable and importlib.util.find_spec(program.package) is None:
        raise UserError(
            f"{program.package} is not installed here\n"
            "name the Python of its environment with --python"
        )
    text = _program_text(program, folder)
    # Run it in a scratch folder
    with tempfile.TemporaryDirectory() as scratch:
        request = Path(scratch) / "request.json"
        answer = Path(scratch) / "answer.json"
        content = {"folder": str(folder.resolve()), "tokens": prompt, "steps": _STEPS}
        request.write_text(json.dumps(content))
        # The text of the program, because the environment need not have this package
        command = [python, "-c", text, str(request), str(answer)]
        try:
            process = subprocess.run(
                command,
                cwd=scratch,
                env=os.environ,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{engine} did not finish within {_SECONDS:.0f} s") from error
        except OSError as error:
            raise UserError(
                f"{engine} could not be started: {first_line(error)}\ncheck --python"
            ) from error
        # Read its answer
        if not answer.exists():
            message = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"{engine} ended with {process.returncode}: {message}")
        result: dict[str, Any] = json.loads(answer.read_text())
    if result["error"] is not None:
        reason = _reason(result["error"], program.converts, python)
        raise UserError(f"{engine} does not run {folder}: {reason}")
    return result


def _program_text(program: Program, folder: Path) -> str:
    """Join the parts of the program that runs an engine on a folder."""
    texts = [file.read_text(encoding="utf-8") for file in (_MAIN, program.file)]
    text = "\n".join(["import sys", *texts, "main(run, *sys.argv[1:])"])
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    if program.registers_type and model_type == custom_model_type.CUSTOM_MODEL_TYPE:
        return f"import spkv_nas\n{text}"
    return text


def _reason(error: str, converts: bool, python: str) -> str:
    """Return an engine's error in one line, and how to mend it if the engine does not know our model type.

    The engine needs this package for that, unless it ``converts`` folders to a format of its own.
    """
    # Keep what the plug-in says of an error that pydantic raises in vLLM
    one_line = " ".join(error.split())
    message = re.sub(r"^ValidationError: .*?Value error, (.*?) \[type=.*", r"\1", one_line)
    lacks_package = re.search(r"(?i)model type .?spkv|no module named 'spkv", message)
    if converts or not lacks_package:
        return message
    return f"{message}\ninstall spkv-nas in the environment of {python}"


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())
