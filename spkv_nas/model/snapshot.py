"""Put a model back as it was when a call that changes it fails, or is interrupted by Ctrl-C.

Hooks, windows, gates, modes and settings are changed in many places, any of which may be interrupted. Instead of an
undo for each, a call remembers everything that it may change, and puts it back at once.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from spkv_nas.model import attention

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")


def unchanged_on_failure(
    function: Callable[Concatenate[PreTrainedModel, Parameters], Value],
) -> Callable[Concatenate[PreTrainedModel, Parameters], Value]:
    """Wrap a function of a model, so that the model is as before the call if it raises or is interrupted."""

    @wraps(function)
    def call(model: PreTrainedModel, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Value:
        before = Snapshot(model)
        try:
            return function(model, *args, **kwargs)
        except BaseException:  # no ``with`` block, whose end could be interrupted before it runs
            before.restore()
            raise

    # Models may be given by name
    return cast("Callable[Concatenate[PreTrainedModel, Parameters], Value]", call)


class Snapshot:
    """Remember hooks, attributes, modes and settings of a model, without copies of its weights."""

    def __init__(self, model: nn.Module) -> None:
        """Remember the current state of ``model``; values of parameters are not part of it."""
        self._objects = [_Object(subject) for subject in _objects(model)]
        self._parameters = [
            (parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()
        ]

    def restore(self) -> None:
        """Put everything back, completely even if this is interrupted itself."""
        try:
            self._restore()
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        """Put everything back; calling it again changes nothing."""
        for remembered in self._objects:
            remembered.restore()
        for parameter, requires_grad, gradient in self._parameters:
            parameter.requires_grad = requires_grad
            parameter.grad = gradient


class _Object:
    """Remember an object's class, its attributes, and what is in those that are dictionaries or sets."""

    def __init__(self, subject: object) -> None:
        self._subject = subject
        self._class = type(subject)
        self._attributes = dict(vars(subject))
        # Dictionaries and sets, and copies of what is in them; a module has a dozen, mostly empty
        self._contents = [
            (value, value.copy())
            for value in self._attributes.values()
            if isinstance(value, (dict, set))
        ]

    def restore(self) -> None:
        """Put them back, into the same dictionaries and sets, because handles of hooks refer to these."""
        if type(self._subject) is not self._class:
            self._subject.__class__ = self._class
        attributes = vars(self._subject)
        for name in attributes.keys() - self._attributes.keys():
            del attributes[name]
        attributes.update(self._attributes)
        for container, items in self._contents:
            container.clear()
            container.update(items)


def _objects(model: nn.Module) -> Iterator[object]:
    """Yield all objects that calls of this package may change: modules, hook states, gate settings and configs."""
    seen: set[int] = set()
    for module in model.modules():
        yield module
        for found in _settings(module):
            if id(found) not in seen:
                seen.add(id(found))
                yield found


def _settings(module: nn.Module) -> Iterator[object]:
    """Yield the configs of a module, those inside them, and the state of its hook with the gate settings."""
    for value in vars(module).values():
        if isinstance(value, attention.LayerState):
            yield value
            yield value.settings
        elif isinstance(value, GenerationConfig):
            yield value
        elif isinstance(value, PreTrainedConfig):
            yield from _configs(value)


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and the configs of its parts, such as that of the text decoder."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value)
