"""Ask an instruct model for numbers that are hidden in a long text, with full attention and with layouts.

    python needles.py MODEL FOLDER LAYOUT... --out OUT --lengths 1800 6700 --texts 6

Each text is a document of FOLDER's files (JSON lines with ``text``) with ten sentences in it, one at every tenth of its
length, such as "The code of the safe is 48213." The model reads it once in its own chat template; then each number is
asked for after a copy of the cache. An answer is right if all its digits are what the model would write (greedy). All
questions about a text share its cache, so that errors are taken over texts. OUT/needles.csv has a row for every answer;
finished texts are kept.
"""

import argparse
import copy
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import spkv_nas

_SUBJECTS = (
    "code of the safe",
    "height of the old tower",
    "phone number of the library",
    "price of the red carriage",
    "room of the violin teacher",
    "weight of the bronze bell",
    "licence of Captain Moore",
    "balance of the orphanage",
    "distance to the glacier",
    "ticket of the lost umbrella",
)
_LAST = "\n\nWhat is the {subject}?"
_ANSWER = "The {subject} is"
_FULL = "full attention"


def main() -> None:
    """Ask the questions that OUT does not have yet, and print the share of right answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("layouts", type=Path, nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1800, 6700])
    parser.add_argument("--texts", type=int, default=6, help="of every length")
    options = parser.parse_args()
    model, tokenizer = spkv_nas.load(options.model, dtype="float32")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "needles.csv"
    rows = pd.read_csv(file).to_dict("records") if file.exists() else []
    done = {(row["layout"], row["length"], row["text"]) for row in rows}
    for length in options.lengths:
        for number, text in zip(
            range(options.texts), _texts(options.folder, tokenizer, length), strict=False
        ):
            prompt = _Prompt(tokenizer, text, seed=number)
            for path in (None, *options.layouts):
                name = _FULL if path is None else path.stem
                if (name, length, number) in done:
                    continue
                layout = None if path is None else spkv_nas.Layout.read(path)
                context = (
                    nullcontext() if layout is None else spkv_nas.layout_applied(model, layout)
                )
                with context:
                    answers = prompt.ask(model, has_layout=layout is not None)
                rows += [
                    {"layout": name, "length": length, "text": number, "subject": subject, **answer}
                    for subject, answer in zip(_SUBJECTS, answers, strict=True)
                ]
                pd.DataFrame(rows).round(4).to_csv(file, index=False)
                right = sum(answer["right"] for answer in answers)
                print(f"{length} tokens, text {number}, {name}: {right} of 10", flush=True)
    print(_table(pd.DataFrame(rows)).to_string())


def _texts(
    folder: Path, tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[list[list[int]]]:
    """Yield documents of all domains in turn, each as ten pieces of tokens, ``length`` in all."""
    by_domain = [
        [json.loads(line)["text"] for line in file.open()]
        for file in sorted(folder.glob("*.jsonl"))
    ]
    num_pieces = len(_SUBJECTS)
    for documents in zip(*by_domain, strict=False):
        for document in documents:
            tokens = tokenizer(document, add_special_tokens=False).input_ids[:length]
            if len(tokens) == length:
                edges = [length * piece // num_pieces for piece in range(num_pieces + 1)]
                yield [tokens[edges[piece] : edges[piece + 1]] for piece in range(num_pieces)]


class _Prompt:
    """Text with hidden numbers, in a chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, pieces: Sequence[list[int]], seed: int
    ) -> None:
        """Hide a number of five digits, drawn by ``seed``, after each of ten ``pieces`` of tokens."""
        generator = random.Random(seed)
        self.numbers = [str(generator.randint(10_000, 99_999)) for _ in _SUBJECTS]
        self._tokenizer = tokenizer
        mark = "<text>"
        messages = [{"role": "user", "content": f"{mark}{_LAST}"}]
        template = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        before, self._after = template.split(mark)
        self.tokens = self._encode(before + "Some numbers are hidden in this text.\n\n")
        for piece, subject, number in zip(pieces, _SUBJECTS, self.numbers, strict=True):
            self.tokens += [*piece, *self._encode(f"\nThe {subject} is {number}.\n")]

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a part of the prompt."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def ask(self, model: PreTrainedModel, *, has_layout: bool) -> list[dict[str, float]]:
        """Return for every subject whether its number is right, and the probability of the whole number."""
        answers = []
        with torch.inference_mode():
            cache = spkv_nas.SPKVCache(model) if has_layout else DynamicCache(config=model.config)
            tokens = torch.tensor([self.tokens])
            model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            for subject, number in zip(_SUBJECTS, self.numbers, strict=True):
                question = self._encode(
                    self._after.format(subject=subject) + _ANSWER.format(subject=subject)
                )
                digits = self._encode(f" {number}")
                part = torch.tensor([[*question, *digits]])
                logits = model(
                    part,
                    past_key_values=copy.deepcopy(cache),
                    use_cache=True,
                    logits_to_keep=len(digits) + 1,
                ).logits[0, :-1]
                target = torch.tensor(digits)
                right = bool((logits.argmax(-1) == target).all())
                log_p = logits.float().log_softmax(-1).gather(1, target[:, None]).sum()
                answers.append({"right": int(right), "probability": float(log_p.exp())})
        return answers


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the percentage of right answers by layout and length, and its paired difference from full attention."""
    by_text = rows.groupby(["length", "layout", "text"], sort=False)["right"].mean().mul(100)
    table = []
    for (length, layout), shares in by_text.groupby(["length", "layout"], sort=False):
        full = by_text.loc[(length, _FULL)]
        shares = shares.droplevel(["length", "layout"])
        difference = shares - full
        table.append(
            {
                "length": length,
                "layout": layout,
                "questions": 10 * len(shares),
                "right": shares.mean(),
                "difference": difference.mean(),
                "error": difference.sem(),
            }
        )
    return pd.DataFrame(table).round(2)


if __name__ == "__main__":
    main()
