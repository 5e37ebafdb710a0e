"""Check, convert and log every call of a public Python function, in one place.

``spkv_nas.__getattr__`` passes public functions through ``public``; commands call the functions inside. Arguments are
converted to the annotated types (``base.arguments``): NumPy's numbers, models in wrappers, layouts and head scores as
paths. Errors name parameters where those of a command name options.
"""

import inspect
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial, wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_type_hints

from spkv_nas.artifacts import head_scores, layout
from spkv_nas.base import arguments, errors, progress
from spkv_nas.data import sources
from spkv_nas.data.blocks import TokenBlocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from spkv_nas.model.snapshot import Snapshot

_OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")  # not in paths of the hub's cache
_LEAST = {
    **dict.fromkeys(("window", "steps", "step_tokens", "batch_size", "max_tokens"), 1),
    **dict.fromkeys(("sinks", "seed", "num_random", "trials"), 0),
    "block_size": 2,
    "context": 1,
}
_REMEDIES = {
    "PreTrainedTokenizerBase": "spkv_nas.load returns the model's",
    "TokenBlocks": "make them with spkv_nas.build_blocks(texts, tokenizer)",
    "Layout": (
        "spkv_nas.propose returns layouts by name, of which choose one, such as layouts['densest']"
    ),
    "HeadScores": "make them with HeadScores.from_array(values)",
    "DocumentNLL": "spkv_nas.evaluate(model, blocks).nll is one",
}


Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")


def public(function: Callable[Parameters, Value]) -> Callable[Parameters, Value]:
    """Wrap a function of the library for Python users."""
    name = function.__name__
    signature = inspect.signature(function)
    is_long = signature.parameters.keys() & {"model", "tokenizer", "path_or_id", "checkpoint"}
    level = logging.INFO if is_long else logging.DEBUG

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Value:
        """Convert the arguments, and call the function outside inference mode."""
        bound = signature.bind(*args, **kwargs)
        torch = sys.modules.get("torch")
        before = None
        try:
            _convert(function, bound)
            # Log the call and its progress
            shown = [_shown(key, value) for key, value in bound.arguments.items()]
            progress.LOGGER.log(level, f"{name}: {', '.join(shown)}")
            if "progress" in signature.parameters and bound.arguments.get("progress") is None:
                bound.arguments["progress"] = progress.logged(name)
            start = time.monotonic()
            # Signals that learn need gradients, and weights that are made in inference mode never have any
            before = _snapshot(bound.arguments.get("model"))
            with nullcontext() if torch is None else torch.inference_mode(False):
                result = function(*bound.args, **bound.kwargs)
            seconds = time.monotonic() - start
            progress.LOGGER.log(level, f"{name}: done in {seconds:.1f} s")
            return result
        except BaseException as error:
            # Leave the model as it was, whether the call failed or was interrupted
            if before is not None:
                before.restore()
            # Name arguments where the message names options of the command line
            if isinstance(error, errors.UserError):
                error.args = (_OPTION.sub(lambda match: match[1].replace("-", "_"), str(error)),)
            raise

    return call


def _convert(function: Callable[..., object], bound: inspect.BoundArguments) -> None:
    """Convert the arguments of a call, except the further ones by name, to the annotated types."""
    kinds = _kinds(function)
    for key, value in bound.arguments.items():
        is_further = bound.signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD
        if key in kinds and not is_further:
            bound.arguments[key] = _argument(function.__name__, key, kinds[key], value)


def _snapshot(model: "PreTrainedModel | None") -> "Snapshot | None":
    """Return what puts a model back as it is now (``model/snapshot.py``); None for a function without one."""
    if model is None:
        return None
    from spkv_nas.model.snapshot import Snapshot

    return Snapshot(model)


@cache
def _kinds(function: Callable[..., object]) -> dict[str, object]:
    """Return the types of a function's parameters by name."""
    try:
        return get_type_hints(function)
    except NameError:  # of a class that is imported for types only
        from transformers import PreTrainedTokenizerBase

        known = {"PreTrainedTokenizerBase": PreTrainedTokenizerBase}
        return get_type_hints(function, localns=known)


def _argument(function: str, name: str, kind: Any, value: Any) -> Any:
    """Return an argument as its parameter's type. Raises ``UserError``, which names the parameter."""
    if name == "model":
        from spkv_nas.model.wrappers import unwrapped

        return unwrapped(value, adds_gates=function in ("attach_gates", "learn_gates"))
    if "Iterable[str" in str(kind) and not isinstance(value, TokenBlocks):
        value = sources.text_argument(name, value)
    converted = arguments.convert(name, kind, value, _CONVERTERS, _remedy(kind))
    if converted is not None:
        _check(function, name, converted)
    return converted


def _check(function: str, name: str, value: Any) -> None:
    """Check a converted argument. Raises ``UserError``, which names the parameter."""
    if isinstance(value, int) and name in _LEAST and value < _LEAST[name]:
        raise errors.UserError(f"{name} must be at least {_LEAST[name]}; found {value}")
    if name == "learning_rate" and value <= 0:
        raise errors.UserError(f"{name} must be above 0; found {value}")
    if name in _PARSERS:
        _check_parses(function, name, value)


def _remedy(kind: object) -> str:
    """Return how to get a value of a type, of those in ``_REMEDIES``; empty for others."""
    for part, remedy in _REMEDIES.items():
        if re.search(rf"\b{part}\b", str(kind)):
            return remedy
    return ""


def _parse_margins(_function: str, text: str) -> None:
    from spkv_nas.evaluation.verdict.criteria import parse_margins

    parse_margins(text)


def _parse_risk(_function: str, risk: str | float) -> None:
    from spkv_nas.evaluation.verdict.criteria import parse_risk

    parse_risk(risk)


def _parse_memory(function: str, memory: str | float) -> None:
    from spkv_nas.cost.cache_cost import parse_memory
    from spkv_nas.proposal import budget

    if function == "auto":  # which takes several
        budget.parse_memories(f"{budget.MEMORY}={memory}")
    else:
        parse_memory(memory)


_PARSERS = {"margin": _parse_margins, "risk": _parse_risk, "memory": _parse_memory}


def _check_parses(function: str, name: str, value: Any) -> None:
    """Check an argument that a function parses before it runs. Raises ``UserError``, which names the argument."""
    try:
        _PARSERS[name](function, value)
    except errors.UserError as error:
        subject = str(error).split(":")[0]
        if name in subject:
            raise
        raise errors.UserError(f"{name} {errors.shortened(repr(value), 60)}: {error}") from error


def _read(read: Callable[[Any], object], value: object) -> object:
    """Return what a path names, or the value of a mapping with one; anything else unchanged."""
    if isinstance(value, Mapping) and len(value) == 1:
        return next(iter(value.values()))
    return read(value) if isinstance(value, str | PathLike) else value


def _tokenizer(value: object) -> object:
    """Return the tokenizer of a multimodal model's processor; anything else unchanged."""
    return getattr(value, "tokenizer", value)


def _nll(value: object) -> object:
    """Return the NLL by document of an evaluation; anything else unchanged."""
    return getattr(value, "nll", value)


# By class: make an instance of what means one
_CONVERTERS: dict[str, Callable[[Any], object]] = {
    "PreTrainedTokenizerBase": _tokenizer,
    "Layout": partial(_read, layout.Layout.read),
    "HeadScores": partial(_read, head_scores.HeadScores.read),
    "DocumentNLL": _nll,
    "Path": partial(_read, Path),
}


def _shown(name: str, value: object) -> str:
    """Return an argument for a log line."""
    if isinstance(value, TokenBlocks):
        return str(value)
    if isinstance(value, int | float | str | PathLike | None):
        return f"{name}={errors.shortened(repr(value), 60)}"
    return type(value).__name__
