"""Test the criterion ``tasks`` of ``verdict``: its answers, its samples, and that it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_cases import CHOICES, READING, WRITING
from transformers import PreTrainedTokenizerBase
from verdict_cases import check_resumes, decisive_model, run, write_folder

pytest.importorskip("lm_eval", reason="lm-eval is not installed (spkv-nas[tasks])")

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.contrib.evaluate.tasks.language_model import CheckpointLM
from spkv_nas.contrib.evaluate.tasks.stage import TaskRounds, run_task, score_documents
from spkv_nas.contrib.evaluate.tasks.suite import SelectedTasks, load_suite
from spkv_nas.model.windows import layout_applied

NUMBER = 48


def suite(names: str) -> list[SelectedTasks]:
    return load_suite(names, ["mine"], [], allow_code=False)


def write_rows(rows: list[dict[str, object]]) -> None:
    Path("mine", "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Write tasks whose right answers are those of the dense model; make their folder the current one."""
    monkeypatch.chdir(tmp_path)
    write_folder(tiny_tokenizer)
    Path("mine").mkdir()
    words = ["fox", "dog", "lazy", "jumps"]
    random = np.random.default_rng(0)
    rows: list[dict[str, object]] = [
        {
            "text": " ".join(random.choice(words, 5)),
            "choices": words,
            "answer": number % 4,
            "name": "",
        }
        for number in range(NUMBER)
    ]
    write_rows(rows)
    shots = "num_fewshot: 2\nfewshot_split: test\n"
    for name, text in {
        "choices": CHOICES,
        "writing": WRITING.replace(" {{choices[answer]}}", "{{name}}").replace('["e"]', '["~"]'),
        "shots": CHOICES.replace("task: choices", "task: shots") + shots,
        "reading": READING,
    }.items():
        Path("mine", f"{name}.yaml").write_text(text.replace("FOLDER", str(tmp_path / "mine")))
    # Answer with the dense model
    (entry,) = suite("writing")
    run_task(
        CheckpointLM(decisive_model(), tiny_tokenizer), entry.tasks[0], Path("answers"), "dense"
    )
    (file,) = Path("answers").glob("writing*")
    _, *samples = map(json.loads, file.read_text().splitlines())
    write_rows(
        [
            row | {"name": sample["filtered_resps"][0]}
            for row, sample in zip(rows, samples, strict=True)
        ]
    )
    return tmp_path


def test_full_attention_passes_and_local_layers_fail(folder: Path) -> None:
    result = run("full.yaml", "three-to-one.yaml", margin="tasks=20:names=writing:include=mine")
    assert result.answers == {"full": "passes", "three-to-one": "fails"}
    full, local = result.rows.to_dict("records")
    assert (full["criterion"], full["unit"], full["loss"]) == ("tasks", "points", 0.0)
    assert local["low"] > 20.0
    assert local["num_samples"] <= 32


def test_an_interrupted_verdict_gives_the_same_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_resumes(
        TaskRounds,
        monkeypatch,
        "three-to-one.yaml",
        margin="tasks=50:names=writing,shots:include=mine",
    )


def test_scores_are_those_of_the_task(
    folder: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """All samples in rounds, each task's in another order, as ``evaluate tasks`` scores them at once."""
    entries, model = suite("choices,writing"), decisive_model()
    layout = Layout(("GG", "GG", "GL", "GG"), window=8)
    with layout_applied(model, layout):
        lm = CheckpointLM(model, tiny_tokenizer)
        expected = [run_task(lm, entry.tasks[0], Path("kept"), "model").values for entry in entries]
        rounds = TaskRounds(entries, tiny_tokenizer, seed=3, allow_code=False)
        measured = rounds.scores(
            [rounds.measure(index, model, {}) for index in range(rounds.num_rounds)]
        )
    first, second = expected[0]["acc"], expected[1]["exact_match"]
    assert len(measured) == rounds.num_samples
    assert NUMBER < len(measured) < 2 * NUMBER
    with layout_applied(model, layout):
        lm = CheckpointLM(model, tiny_tokenizer)
        order = [7, 2, 31]
        assert score_documents(lm, entries[0].tasks[0], order, seed=0) == [
            first[index] for index in order
        ]
    # The task that has run out scored all of its samples, and the other one some
    totals = sorted([sum(first), sum(second)])
    assert totals[0] <= sum(measured) <= sum(totals)
    assert 0.0 < np.mean(measured) < 1.0


def test_few_shot_examples_do_not_depend_on_earlier_rounds(
    folder: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts: list[list[str]] = []

    class Listening(CheckpointLM):
        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:
            prompts.append([request.args[0] for request in requests])
            return super().loglikelihood(requests, disable_tqdm)

    lm = Listening(decisive_model(), tiny_tokenizer)
    for seeds in ((5, 6), (6,)):
        (entry,) = suite("shots")
        for seed in seeds:
            score_documents(lm, entry.tasks[0], [4, 9], seed=seed)
    assert prompts[0] != prompts[1] == prompts[2]


def test_the_order_is_random_and_of_equal_shares(
    folder: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    rounds, again, other = (
        TaskRounds(suite("choices,writing"), tiny_tokenizer, seed=seed, allow_code=False)
        for seed in (0, 0, 1)
    )
    assert rounds.identity == again.identity != other.identity
    assert rounds.num_samples != other.num_samples


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("include=mine", "needs names"),
        ("names=none:include=mine", "unknown task 'none'"),
        ("names=reading:include=mine", "word_perplexity, is no mean of scores from 0 to 1"),
        ("names=choices:include=nowhere", "folder of tasks not found: nowhere"),
    ],
)
def test_mistakes(folder: Path, options: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run("full.yaml", margin=f"tasks=2:{options}")
