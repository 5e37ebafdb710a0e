"""Test the registry of built-in and third-party entries."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError
from types import ModuleType, SimpleNamespace

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
    points = [EntryPoint(f"entry{index}", value, "spkv_nas.fruit") for index, value in enumerate(values)]
    monkeypatch.setattr(registry, "entry_points", lambda group: [point for point in points if point.group == group])
    return Registry("spkv_nas.fruit", "fruit", Fruit, (APPLE,))


def test_lists_built_in_entries_before_those_of_packages(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.PEAR = PEAR  # type: ignore[attr-defined]
    fruit = registry_with(monkeypatch, "orchard:PEAR")
    assert fruit.names == ("apple", "pear")
    assert list(fruit) == [APPLE, PEAR]
    assert fruit["pear"] is PEAR


def test_own_entries_come_before_those_of_other_packages(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.PEAR, plugin.PLUM = PEAR, Fruit("plum")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spkv_nas.orchard", plugin)
    fruit = registry_with(monkeypatch, "orchard:PEAR", "spkv_nas.orchard:PLUM")
    assert fruit.names == ("apple", "plum", "pear")


@pytest.mark.parametrize(("group", "is_missing"), [(None, True), ("console_scripts", True), ("spkv_nas.fruit", False)])
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


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("OTHER", Fruit("apple"), r"fruit 'apple' is defined twice; orchard:OTHER is the second"),
        ("OTHER", "pear", "orchard:OTHER is no Fruit"),
        ("MISSING", None, "cannot load the fruit orchard:OTHER: AttributeError"),
    ],
)
def test_names_the_package_that_cannot_be_used(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, message: str
) -> None:
    setattr(plugin, attribute, value)
    with pytest.raises(UserError, match=message):
        assert registry_with(monkeypatch, "orchard:OTHER").entries
