"""Answer a request of ``engine_check.py`` in an engine's environment: the main program of every ``run_*.py``.

    python -c PROGRAM REQUEST.json ANSWER.json

``engine_check.py`` puts this text before that of the engine, whose function ``run`` then answers.
"""

import json
import os
from collections.abc import Callable
from typing import Any


def main(run: Callable[[dict[str, Any]], dict[str, Any]], request: str, answer: str) -> None:
    """Answer a request; an error is an answer as well."""
    with open(request, encoding="utf-8") as file:
        content = json.load(file)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        result = {"error": None, "cache": [], **run(content)}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    with open(answer, "w", encoding="utf-8") as file:
        json.dump(result, file)
