"""What the YAML files of ``assets/tasks`` call: the data of the shipped tasks, and its form."""

from __future__ import annotations

import json
from typing import Any

import datasets

from spkv_nas.base.assets import TASKS


def stdlib_completions(**_: Any) -> dict[str, datasets.Dataset]:
    """200 places in Python's standard library, which ``tests/golden/make_completions.py`` has found."""
    lines = (TASKS / "stdlib_completions.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}


def names(doc: dict[str, Any]) -> list[str]:
    """The choices as they follow the context."""
    return [doc["space"] + name for name in doc["choices"]]


def by_article(rows: datasets.Dataset) -> datasets.Dataset:
    """RACE in lm-eval's form: one row for each article, ``problems`` being the text of a list of its questions."""
    articles: dict[str, dict[str, Any]] = {}
    for row in rows:
        own = articles.setdefault(row["example_id"], {"article": row["article"], "problems": []})
        own["problems"].append({name: row[name] for name in ("question", "options", "answer")})
    return datasets.Dataset.from_list(
        [{"article": one["article"], "problems": repr(one["problems"])} for one in articles.values()]
    )
