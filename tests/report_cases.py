"""Inputs of a report with layouts retrained at three lengths."""

from __future__ import annotations

from typing import Any

from helpers import make_comparison, make_domain_table, make_layouts, make_search

from spkv_nas.report.inputs import ReportInputs


def make_evidence(**search: Any) -> ReportInputs:
    heads = ["GG GL LL LL", "GG GL LL LL", "GL LG GL LL", "GL LG LL GL", "LL LL GG GL"]
    return ReportInputs(
        make_domain_table(),
        make_layouts("densest", "last"),
        comparison=make_comparison(),
        search=make_search(heads=heads, **search),
        search_record={"steps": {"short": 30, "full": 120}},
    )
