"""Functions called by the YAML files of ``assets``: load and reshape the data of the shipped tasks."""

import json
from pathlib import Path
from typing import Any

import datasets

ASSETS = Path(__file__).with_name("assets")  # tasks and their data


def stdlib_completions(**_: Any) -> dict[str, datasets.Dataset]:
    """Load 200 completion points in Python's standard library, made by ``tests/golden/make_completions.py``."""
    lines = (ASSETS / "stdlib_completions.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}


def names(doc: dict[str, Any]) -> list[str]:
    """Return the choices as they continue the context."""
    return [doc["space"] + name for name in doc["choices"]]


def by_article(rows: datasets.Dataset) -> datasets.Dataset:
    """Reshape RACE for lm-eval: one row per article, with ``problems`` as the text of its list of questions."""
    articles: dict[str, dict[str, Any]] = {}
    for row in rows:
        article = articles.setdefault(
            row["example_id"], {"article": row["article"], "problems": []}
        )
        article["problems"].append({name: row[name] for name in ("question", "options", "answer")})
    return datasets.Dataset.from_list(
        [
            {"article": article["article"], "problems": repr(article["problems"])}
            for article in articles.values()
        ]
    )
