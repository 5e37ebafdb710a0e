"""Test the registry of built-in and third-party entries."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError
from types import ModuleType, SimpleNamespace
from typing import Annotated

import pytest

from spkv_nas.base import registry
from spkv_nas.base.errors import UserError
from spkv_nas.base.registry import Registry


@dataclass(frozen=True)
class Fruit:
    name: str


APPLE, PEAR = Fruit("apple"), Fruit("pear")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install a module as a third-party package whose entry points are those of the test."""
    module = ModuleType("orchard")
    monkeypatch.setitem(sys.modules, "orchard", module)
    return module


def registry_with(monkeypatch: pytest.MonkeyPatch, *values: str) -> Registry[Fruit]:
    """Return a registry of one fruit, with these third-party entry points."""
    points = [
        EntryPoint(f"entry{index}", value, "spkv_nas.fruit") for index, value in enumerate(values)
    ]
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [point for point in points if point.group == group]
    )
    return Registry("spkv_nas.fruit", "fruit", Fruit, (APPLE,))


def test_lists_built_in_entries_before_those_of_packages(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.PEAR = PEAR  # type: ignore[attr-defined]
    fruit = registry_with(monkeypatch, "orchard:PEAR")
    assert fruit.names == ("apple", "pear")
    assert list(fruit) == [APPLE, PEAR]
    assert fruit["pear"] is PEAR


def test_own_entries_come_before_those_of_other_packages(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.PEAR, plugin.PLUM = PEAR, Fruit("plum")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spkv_nas.orchard", plugin)
    fruit = registry_with(monkeypatch, "orchard:PEAR", "spkv_nas.orchard:PLUM")
    assert fruit.names == ("apple", "plum", "pear")


@pytest.mark.parametrize(
    ("group", "is_missing"), [(None, True), ("console_scripts", True), ("spkv_nas.fruit", False)]
)
def test_missing_entry_points_of_this_project_are_named(
    monkeypatch: pytest.MonkeyPatch, group: str | None, is_missing: bool
) -> None:
    """As in a clone that is used without being installed, or was installed long ago."""

    def installed(name: str) -> SimpleNamespace:
        assert name == "spkv-nas"
        if group is None:
            raise PackageNotFoundError
        return SimpleNamespace(entry_points=[EntryPoint("plum", "spkv_nas.orchard:PLUM", group)])

    fruit = registry_with(monkeypatch)
    monkeypatch.setattr(registry, "distribution", installed)
    with pytest.raises(UserError, match="unknown fruit 'plum'") as raised:
        fruit["plum"]
    assert ("pip install --editable ." in str(raised.value)) == is_missing


def test_names_the_entries_for_an_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown fruit 'plum'; expected one of apple"):
        registry_with(monkeypatch)["plum"]


@dataclass(frozen=True)
class Unfinished(Fruit):
    """Fruit without a name by default, so that it cannot be instantiated without arguments."""


class Leaving(Fruit):
    """Fruit whose construction ends the process."""

    def __init__(self) -> None:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("OTHER", Fruit("apple"), "its name 'apple' is that of another one"),
        ("OTHER", Fruit(None), "its name is no text"),  # type: ignore[arg-type]
        ("OTHER", "pear", "it is no Fruit"),
        (
            "OTHER",
            Unfinished,
            "TypeError: Unfinished.__init__\\(\\) missing 1 required positional argument: 'name'",
        ),
        ("OTHER", Leaving, "SystemExit: 3"),
        ("MISSING", None, "AttributeError: module 'orchard' has no attribute 'OTHER'"),
    ],
)
def test_leaves_out_what_cannot_be_used(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, message: str
) -> None:
    """With one line that names the package; the other entries stay."""
    setattr(plugin, attribute, value)
    plugin.PEAR = PEAR  # type: ignore[attr-defined]
    fruit = registry_with(monkeypatch, "orchard:OTHER", "orchard:PEAR")
    with pytest.warns(
        UserWarning, match=rf"^cannot load the fruit orchard:OTHER: {message}; it is left out"
    ) as seen:
        assert fruit.names == ("apple", "pear")
    assert len(seen) == 1
    assert "\n" not in str(seen[0].message)


@dataclass(frozen=True)
class Flower(registry.Entry):
    """Entry with options, which ``--help`` reads of all."""

    name, help = "flower", "a flower"


class Silent(Flower):
    name = "silent"
    help = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Misspelt(Flower):
    name = "misspelt"
    petals: Annotated[Number, 5] = 5  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Silent, "its help is no text"),
        (Misspelt, "NameError: name 'Number' is not defined"),
    ],
)
def test_leaves_out_what_the_help_cannot_show(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, entry: type[Flower], message: str
) -> None:
    """The help of every command that lists such entries ended in a traceback."""
    plugin.OTHER = entry  # type: ignore[attr-defined]
    registry_with(monkeypatch, "orchard:OTHER")
    flowers = Registry("spkv_nas.fruit", "flower", Flower, (Flower(),))
    with pytest.warns(
        UserWarning, match=f"^cannot load the flower orchard:OTHER: {message}; it is"
    ):
        assert flowers.names == ("flower",)


def test_an_own_entry_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"cannot load the fruit spkv_nas\.orchard:PLUM: ModuleNotFoundError"
    ):
        assert registry_with(monkeypatch, "spkv_nas.orchard:PLUM").entries
