"""Write stdlib_completions.jsonl, a task of ``evaluate tasks``: completions that need a name from beyond the window.

Of every held-out document of the embedded models' text at most eight places where the next word is a name that the text
before has, but not its last 160 characters, a window of about 50 tokens; three other such names are the wrong choices.

    python tests/golden/make_completions.py
"""

from __future__ import annotations

import json
import keyword
import re
from pathlib import Path
from random import Random
from typing import Any

from spkv_nas.base.assets import EMBEDDED
from spkv_nas.data.sources import documents, heldout
from spkv_nas.training.recipe import Recipe

NUMBER, OF_DOCUMENT = 200, 8
BEFORE, NEAR = 640, 160  # characters of a context, and of its end that has none of the choices
WORD = re.compile(r"\b[A-Za-z_]\w{3,}", re.ASCII)
FILE = Path(__file__).parents[2] / "spkv_nas/contrib/evaluate/tasks/assets/stdlib_completions.jsonl"


def main() -> None:
    """Write the file."""
    recipe = Recipe.read(EMBEDDED / "recipe.yaml")
    rng = Random(0)
    samples: list[dict[str, Any]] = []
    for document in documents(recipe.data.sources, EMBEDDED):
        if document.domain == "code" and heldout(document, recipe.data.heldout):
            samples += places(document.text, document.name, rng)
    chosen = sorted(rng.sample(samples, NUMBER), key=lambda one: (one["source"], one["context"]))
    FILE.write_text("".join(json.dumps(one) + "\n" for one in chosen))
    print(f"{FILE}: {len(samples)} places, {FILE.stat().st_size} bytes")


def places(text: str, source: str, rng: Random) -> list[dict[str, Any]]:
    """Yield evenly drawn places of one document. A name includes the space before it, as in most tokenizers."""
    result = []
    for word in WORD.finditer(text, BEFORE):
        context = text[word.start() - BEFORE : word.start()]
        # The first may be cut
        words = [one for one in WORD.finditer(context, 1) if not keyword.iskeyword(one[0])]
        last = {one[0]: one.end() for one in words}
        names = sorted(name for name, end in last.items() if end <= BEFORE - NEAR)
        if word[0] in names and len(names) > 3:
            names.remove(word[0])
            space = " " * context.endswith(" ")
            choices = [word[0], *rng.sample(names, 3)]
            rng.shuffle(choices)
            sample = {"source": source, "context": context.removesuffix(" "), "space": space}
            result.append({**sample, "choices": choices, "answer": word[0]})
    return rng.sample(result, min(OF_DOCUMENT, len(result)))


if __name__ == "__main__":
    main()
