"""Small downstream tasks for tests, with choices and with generated text, and a model that answers them."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from helpers import tiny_model
from transformers import PreTrainedModel

from spkv_nas.artifacts.layout import Layout
from spkv_nas.model.windows import apply_layout

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "the",
    "quick",
    "dog",
    "jumps",
]

CHOICES = """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choices.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITING = """\
task: writing
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choices.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{text}}"
doc_to_target: " {{choices[answer]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match}]
"""
READING = """\
task: reading
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choices.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""


def write_tasks(folder: Path) -> Path:
    """Write three tasks on eleven samples of different lengths, and a group of two of them, to a folder."""
    folder.mkdir()
    rows = [
        {
            "text": " ".join(WORDS[: 3 + n]),
            "choices": [WORDS[n], "dog", "the lazy fox"],
            "answer": n % 3,
        }
        for n in range(11)
    ]
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in {"choices": CHOICES, "writing": WRITING, "reading": READING}.items():
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    short = yaml.safe_load((folder / "choices.yaml").read_text()) | {
        "task": "few",
        "process_docs": "!",
    }
    text = yaml.safe_dump(short).replace("'!'", "!function short.first")
    (folder / "few.yaml").write_text(text)
    (folder / "short.py").write_text("def first(rows):\n    return rows.select(range(4))\n")
    means = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]"
    (folder / "both.yaml").write_text(f"group: both\ntask: [choices, few]\n{means}\n")
    return folder


def hybrid() -> PreTrainedModel:
    """Make a tiny model, half of whose layers are local."""
    model = tiny_model(vocab_size=300)
    apply_layout(model, Layout(("GG", "LL", "LL", "GG"), window=6))
    return model
