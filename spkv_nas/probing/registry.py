"""Registry of the signals that ``probe --signal`` measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag
from spkv_nas.base.registry import Registry
from spkv_nas.probing.signal import Option, Signal
from spkv_nas.probing.signals.ablation import CLOSING, OPENING
from spkv_nas.probing.signals.density import DENSITY
from spkv_nas.probing.signals.duo import DUO
from spkv_nas.probing.signals.head_gates import HEAD_GATES

SIGNALS: Registry[Signal] = Registry(
    "spkv_nas.signals",
    "signal",
    Signal,  # type: ignore[type-abstract]
    (DENSITY, HEAD_GATES, OPENING, CLOSING, DUO),
)


@dataclass(frozen=True)
class SharedOption:
    """Option of one or several signals, as one flag of ``probe``.

    Attributes:
        name: parameter of ``Signal.measure``.
        declared: the option of each signal that takes it, by the signal's name.
    """

    name: str
    declared: dict[str, Option]

    @property
    def type(self) -> type:
        """Return the type of its values."""
        return next(iter(self.declared.values())).type

    @property
    def flag(self) -> Flag:
        """Return its help text and bounds."""
        return next(iter(self.declared.values())).flag

    @property
    def default_text(self) -> str:
        """Return its default, or the defaults of its signals, as the help shows them."""
        texts = {name: option.default_text for name, option in self.declared.items()}
        if len({*texts.values()}) == 1:
            return next(iter(texts.values()))
        return "; ".join(f"{name}: {text}" for name, text in texts.items())


def signal_options() -> tuple[SharedOption, ...]:
    """Return the options of all signals, in the order of the signals.

    Raises:
        UserError: two signals declare an option of one name with different flags.
    """
    declared: dict[str, dict[str, Option]] = {}
    for signal in SIGNALS:
        for option in signal.options:
            others = declared.setdefault(option.name, {})
            for other, shared in others.items():
                if (shared.type, shared.flag) != (option.type, option.flag):
                    raise UserError(
                        f"signals {other} and {signal.name} declare --{_dashed(option.name)} with different flags\n"
                        f"rename the option of {signal.name}, or reuse the flag of {other}"
                    )
            others[signal.name] = option
    return tuple(SharedOption(name, options) for name, options in declared.items())


def check_options(signal: str | Signal, **options: Any) -> dict[str, Any]:
    """Return the options that are not None, converted to their types.

    Args:
        signal: a signal or its name.
        **options: values by option name; names that no signal declares are not checked.

    Raises:
        UserError: the signal is unknown, an option is not for it, or a value is of another type or out of bounds.
    """
    entry = SIGNALS[signal]
    values = {name: value for name, value in options.items() if value is not None}
    for shared in signal_options():
        if shared.name in values and entry.option(shared.name) is None:
            raise UserError(
                f"--{_dashed(shared.name)} does not apply to --signal {entry.name}; "
                f"it applies to {', '.join(shared.declared)}"
            )
    return values | {
        option.name: option.checked(values[option.name]) for option in entry.options if option.name in values
    }


def _dashed(name: str) -> str:
    return name.replace("_", "-")
