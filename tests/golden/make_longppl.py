"""Write longppl.json, the results of the package longppl 0.3.0 on three texts, for tests/evaluation/test_longppl.py.

The evaluator is the embedded dense model, and so is the model that is judged: once with its own tokenizer, once with
one without merges, whose tokens are bytes. Neither adds BOS, which the package puts before the first window alone, and
we before each. The package has an environment of its own:

    python -m venv lp && lp/bin/pip install longppl==0.3.0 && lp/bin/python tests/golden/make_longppl.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from longppl.longppl import compute_longppl
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
DENSE = ROOT / "spkv_nas" / "assets" / "stdlib-21x3" / "dense"
SHORT, STRIDE = 96, 40
# Of the package, which no model has read
FILES = (
    "proposal/coverage.py",
    "data/batches.py",
    "artifacts/shape.py",
)
MAX_CHARACTERS = 1800  # characters, about 500 tokens


def main() -> None:
    """Write the file."""
    model = AutoModelForCausalLM.from_pretrained(DENSE, dtype=torch.float32).eval()
    backend = json.loads(AutoTokenizer.from_pretrained(DENSE).backend_tokenizer.to_str())
    backend["post_processor"] = None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)))
    backend["model"]["merges"] = []
    letters = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)))
    results: list[dict[str, Any]] = []
    for name in FILES:
        text = (ROOT / "spkv_nas" / name).read_text()[:MAX_CHARACTERS]
        spans = Path(__file__).with_name("spans.txt")
        result = compute_longppl(
            text,
            model,
            model,
            tokenizer,
            tokenizer,
            save_path=str(spans),
            trunc_len=SHORT,
            sliding_window=STRIDE,
        )
        by_letter = compute_longppl(
            text, model, model, letters, tokenizer, trunc_len=SHORT, sliding_window=STRIDE
        )
        marked = [json.loads(span) for span in spans.read_text().split(";")]
        spans.unlink()
        results.append(
            {"text": text, "spans": marked, "own": plain(result), "by_letter": plain(by_letter)}
        )
    file = Path(__file__).with_name("longppl.json")
    file.write_text(
        json.dumps({"short": SHORT, "stride": STRIDE, "texts": results}, indent=1) + "\n"
    )
    print(
        f"{file}: {file.stat().st_size} bytes, key tokens {[one['own']['n_key_token'] for one in results]}"
    )


def plain(result: dict[str, Any]) -> dict[str, float]:
    """Convert numbers to those of JSON."""
    return {key: float(value) for key, value in result.items()}


if __name__ == "__main__":
    main()
