"""Cut documents to their first tokens, and divide them into those that choose layouts and those that are measured.

    python text.py MODEL FOLDER OUT --length 8192 --select 6 --evaluate 4

FOLDER has a file of JSON lines for every domain, with ``id`` and ``text``. Documents of more than ``--length`` tokens
are taken in a random order. ``--without OUT2`` drops those that ``study.py`` measures costs on, in another text of this
script.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spkv_nas.model.checkpoint import load_tokenizer

_CHARACTERS = 8  # per token, at most: enough of a text to cut it
_USED = 2  # documents of a domain that a step of ``study.py`` takes: the first ones


def main() -> None:
    """Write OUT/select, OUT/evaluate and OUT/costs, with a file for every domain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument(
        "--select", type=int, required=True, help="documents of a domain that choose layouts"
    )
    parser.add_argument(
        "--evaluate", type=int, required=True, help="documents of a domain that are measured"
    )
    parser.add_argument(
        "--costs", type=int, default=0, help="documents after the first of these, for costs alone"
    )
    parser.add_argument("--without", type=Path, help="folder of another text")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    for file in sorted(options.folder.glob("*.jsonl")):
        used = set() if options.without is None else _names(options.without / "select" / file.name)
        rows = _rows(file)
        random.Random(0).shuffle(rows)
        cut = _cut(rows, tokenizer, options.length)
        kept = [row for row, _ in zip(cut, range(options.select + options.evaluate), strict=False)]
        unused = [row for row in kept if row["id"] not in used]
        measured = {row["id"] for row in kept[: options.evaluate]}
        others = [row for row in unused if row["id"] not in measured]
        end = _USED + options.costs
        parts = {
            "evaluate": [row for row in unused if row["id"] in measured],
            "select": others[:_USED] + others[end:],
            "costs": others[_USED:end],
        }
        for name, part in parts.items():
            if part:
                (options.out / name).mkdir(parents=True, exist_ok=True)
                (options.out / name / file.name).write_text(
                    "".join(f"{json.dumps(row)}\n" for row in part)
                )
        print(file.stem, {name: len(part) for name, part in parts.items()})


def _rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a file."""
    return [json.loads(line) for line in file.open()]


def _names(file: Path) -> set[str]:
    """Return the names of a file's first documents; none without the file."""
    return {row["id"] for row in _rows(file)[:_USED]} if file.is_file() else set()


def _cut(rows: list[dict[str, Any]], tokenizer: Any, length: int) -> Iterator[dict[str, Any]]:
    """Yield documents that are long enough, cut to ``length`` tokens."""
    for row in rows:
        if "id" not in row:
            continue
        beginning = row["text"][: _CHARACTERS * length]
        offsets = tokenizer(beginning, return_offsets_mapping=True)["offset_mapping"]
        if len(offsets) > length:
            yield {"id": row["id"], "text": beginning[: offsets[length][0]]}


if __name__ == "__main__":
    main()
