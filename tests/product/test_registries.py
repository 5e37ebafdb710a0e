"""Test that every entry of an extension point is documented, wherever else it is listed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from paths import ROOT

from spkv_nas.base.registry import Registry
from spkv_nas.cli.evaluate import EVALUATIONS
from spkv_nas.cost.engines.registry import ENGINES
from spkv_nas.evaluation.verdict.registry import CRITERIA
from spkv_nas.model.export.registry import TARGETS
from spkv_nas.probing.registry import SIGNALS
from spkv_nas.proposal.registry import STRATEGIES
from spkv_nas.search.registry import SAMPLERS

PAGES: list[tuple[Registry[Any], str]] = [
    (SIGNALS, "guides/scores"),
    (STRATEGIES, "guides/layouts"),
    (TARGETS, "tutorials/serve"),
    (SAMPLERS, "guides/search"),
    (EVALUATIONS, "guides/evaluation"),
    (ENGINES, "guides/cost"),
    (CRITERIA, "guides/verdict"),
]


@pytest.mark.parametrize(("registry", "page"), PAGES, ids=[registry.group for registry, _ in PAGES])
def test_every_entry_is_on_its_page(registry: Registry[Any], page: str) -> None:
    """In code, as the value that a user gives."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    code = " ".join(re.findall(r"`[^`\n]+`|```.*?```", text, re.DOTALL))
    missing = [entry.name for entry in registry if not re.search(rf"(?<![\w-]){entry.name}(?![\w-])", code)]
    assert not missing
    assert registry.built_in
