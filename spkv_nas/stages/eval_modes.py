"""Share code between the modes of ``evaluate``: their option checks, and loading checkpoints with hard gates."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from spkv_nas.base.device import AUTO, dtype_name, measuring_device
from spkv_nas.base.distributed import connect
from spkv_nas.base.errors import UserError
from spkv_nas.base.progress import Reporter
from spkv_nas.evaluation.thresholds import check_tau
from spkv_nas.stages.options import EvaluateOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Loaded = tuple["PreTrainedModel", "PreTrainedTokenizerBase"]

RULER, TASKS, LONGPPL = "--ruler LENGTHS", "--tasks NAMES", "--longppl"
_TEXT = "held-out text"  # the default mode
_GO_WITH = {  # modes that take an option; options not listed apply to all modes
    "data": (_TEXT, TASKS, LONGPPL),
    **dict.fromkeys(("max_tokens", "block_size"), (_TEXT, LONGPPL)),
    **dict.fromkeys(("tau_sweep", "points"), (_TEXT,)),
    **dict.fromkeys(("ruler_tasks", "samples", "haystack", "qa", "window", "seed"), (RULER,)),
    **dict.fromkeys(("include", "limit", "allow_code"), (TASKS,)),
    **dict.fromkeys(("evaluator", "short", "stride", "alpha", "beta"), (LONGPPL,)),
}
_REASONS = {**dict.fromkeys((RULER, TASKS), "asks questions of its own"), LONGPPL: "judges key tokens"}


def check_mode(options: EvaluateOptions) -> None:
    """Raise ``UserError`` for options that exclude each other, or a threshold outside [0, 1]."""
    requested = {RULER: options.ruler is not None, TASKS: options.tasks is not None, LONGPPL: options.longppl}
    chosen = [mode for mode, is_requested in requested.items() if is_requested]
    if len(chosen) > 1:
        raise UserError(f"give {' or '.join(mode.split()[0] for mode in chosen)}, one after the other")
    mode = chosen[0] if chosen else _TEXT
    for name, modes in _GO_WITH.items():
        if getattr(options, name) not in (None, False) and mode not in modes:
            flag = f"--{name.replace('_', '-')}"
            if _TEXT in modes:
                raise UserError(f"{mode.split()[0]} {_REASONS[mode]}, at one threshold: leave {flag} out")
            raise UserError(f"{flag} goes with {' or '.join(modes)}")
    if options.against is not None and options.tau_sweep is not None:
        raise UserError("--against compares at one threshold: leave --tau-sweep out")
    check_tau(options.tau)


def check_pair(model: str, against: str | None) -> None:
    """Raise ``UserError`` if two checkpoints differ in their tokenizer, before anything large is read."""
    from spkv_nas.data.block_cache import fingerprint
    from spkv_nas.model.checkpoint import load_tokenizer

    if against is not None and fingerprint(load_tokenizer(against)) != fingerprint(load_tokenizer(model)):
        raise UserError(
            f"--against {against} has another tokenizer: NLL is a mean over tokens, and a pair must be of the same ones"
        )


def load(options: EvaluateOptions, source: str, reporter: Reporter) -> Loaded:
    """Load a checkpoint and its tokenizer; joins torchrun's processes and must be called on all ranks."""
    from spkv_nas.model.checkpoint import load_on
    from spkv_nas.model.model_shape import check_tokens

    reporter.announce(f"loading {source}")
    device = measuring_device(options.device)
    connect(device)
    model, tokenizer = load_on(source, device, options.dtype, spreads=options.device == AUTO)
    check_tokens(model, max(tokenizer.get_vocab().values()))
    return model, tokenizer


def identity(source: str, loaded: Loaded, mode: str) -> str:
    """Return a string of everything that answers depend on besides the questions.

    It names checkpoint, dtype, tokenizer and ``mode``. Answer files have its hash in their names.
    """
    from spkv_nas.data.block_cache import fingerprint
    from spkv_nas.model.checkpoint import checkpoint_hash

    model, tokenizer = loaded
    return f"{checkpoint_hash(source)} {model.dtype} {fingerprint(tokenizer)} {mode}"


def hard(model: PreTrainedModel, tau: float | None) -> AbstractContextManager[Any]:
    """Return a context in which a model's gates are hard. Raises ``UserError`` for a threshold without gates."""
    from spkv_nas.model.config_section import gate_config
    from spkv_nas.model.modes import gate_mode

    if gate_config(model) is not None:
        return gate_mode(model, "hard", tau)
    if tau is not None:
        raise UserError("this model has no gates, so a threshold means nothing to it: leave --tau out")
    return nullcontext()


def with_open_gates(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Return a context in which a model's gates, if it has any, are open."""
    from spkv_nas.model.config_section import gate_config
    from spkv_nas.model.modes import gate_mode

    return nullcontext() if gate_config(model) is None else gate_mode(model, "open")


def origin(source: str, model: PreTrainedModel, tau: float | None) -> dict[str, Any]:
    """Return the record of which checkpoint was evaluated, at which dtype and threshold."""
    from spkv_nas.model.checkpoint import model_origin
    from spkv_nas.model.config_section import gate_config

    gates = gate_config(model)
    checkpoint_tau = None if gates is None else gates.tau
    return {
        **model_origin(source),
        "computed_in": dtype_name(model.dtype),
        "tau": checkpoint_tau if tau is None else tau,
    }
