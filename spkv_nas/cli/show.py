"""Print results for people: tables and sentences of the workflow, of training, of evaluation and of layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
