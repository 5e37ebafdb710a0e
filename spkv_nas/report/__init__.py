"""Floor 4: the report, from density table, layouts and comparison to one self-contained page and its figures."""

from spkv_nas.report.page import write_report

__all__ = ["write_report"]
