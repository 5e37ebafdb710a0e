"""Test RULER samples: each task hides its needles as it claims, fills the length and is reproducible everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from marks import slow
from paths import TESTS
from ruler_bytes import digest, embedded_tokenizer
from scipy.stats import kstest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spkv_nas.base.errors import UserError
from spkv_nas.data.ruler.material import Essays, Material
from spkv_nas.data.ruler.sample import Sample
from spkv_nas.data.ruler.tasks import _DRAW, TASKS, available, generate, hide, noise
from spkv_nas.data.ruler.words import all_words

NEEDLES = [task for task in TASKS if task.startswith("niah")]
LENGTHS = (512, 1024, 4096, 32768)
# Most tokens of a unit, where above 10
LARGE = {
    "niah_multikey_2": 40,
    "niah_multikey_3": 100,
    "qa_1": 60,
    "qa_2": 60,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return embedded_tokenizer()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Write essays, and questions in the formats of SQuAD and HotpotQA."""
    folder, rng = tmp_path_factory.mktemp("ruler"), Random(0)
    words = ("the", "value", "of", "this", "is", "a", "new", "line", "with", "more", "text")
    sentences = [
        " ".join(rng.choices(words, k=rng.randint(3, 15))).capitalize() + "." for _ in range(400)
    ]
    (folder / "essays.txt").write_text(" ".join(sentences))
    passages = [f"Note {i}. " + " ".join(rng.sample(sentences, 3))[:120] for i in range(1200)]
    articles = [
        {
            "paragraphs": [
                {
                    "context": passage,
                    "qas": [
                        {
                            "question": f"What of {passage[:9]}?",
                            "answers": [{"text": "value"}, {"text": "the value"}],
                        },
                        {"question": "Nothing?", "answers": [], "is_impossible": True},
                    ],
                }
                for passage in passages[start : start + 4]
            ]
        }
        for start in range(0, 1200, 4)
    ]
    (folder / "squad.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    rows = [
        {
            "question": f"Which {i}?",
            "answer": "line",
            "context": [[f"Title {i}", [passages[i], " More."]]] * 2,
        }
        for i in range(1200)
    ]
    (folder / "hotpot.json").write_text(json.dumps(rows))
    return folder / "essays.txt", folder / "squad.json", folder / "hotpot.json"


@pytest.fixture(scope="module")
def material(files: tuple[Path, Path, Path]) -> Material:
    essays, squad, hotpot = map(str, files)
    return Material.read([essays], [squad, hotpot])


def samples(task: str, length: int, number: int, *where: object) -> list[Sample]:
    return [generate(task, 0, index, length, *where) for index in range(number)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "length"),
    [(task, LENGTHS[number % 2]) for number, task in enumerate(TASKS)]
    + [slow((task, LENGTHS[2 + number % 2])) for number, task in enumerate(TASKS)],
)
def test_samples_fill_but_never_exceed_the_length(
    task: str, length: int, tokenizer: PreTrainedTokenizerBase, material: Material
) -> None:
    """At least 97 % is filled, or all but less than one unit where units are large."""
    for sample in samples(task, length, 1 if length > 1024 else 5, tokenizer, material):
        assert sample.num_tokens == len(tokenizer(sample.text, verbose=False)["input_ids"])
        used = sample.num_tokens + sample.new_tokens
        assert length - max(0.03 * length, LARGE.get(task, 0)) <= used <= length
        assert len(set(sample.answers)) == len(sample.answers) > 0


@pytest.mark.slow
def test_two_processes_make_the_same_bytes(tokenizer: PreTrainedTokenizerBase) -> None:
    script, environment = TESTS / "ruler_bytes.py", {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == digest(tokenizer)


def test_seed_index_and_length_matter(tokenizer: PreTrainedTokenizerBase) -> None:
    places = [(0, 0, 512), (1, 0, 512), (0, 1, 512), (0, 0, 600)]
    assert len({generate("niah_single_1", *setting, tokenizer).answers for setting in places}) == 4


@pytest.mark.parametrize("task", NEEDLES)
def test_every_needle_is_there_once(
    task: str, tokenizer: PreTrainedTokenizerBase, material: Material
) -> None:
    num_answers = {"niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    for sample in samples(task, 1024, 4, tokenizer, material):
        named = re.findall(r"A magic \w+ of ([\w-]+(?: [\w-]+)*?) is ([\w-]+)\.", sample.text)
        result = {value: key for key, value in named}
        assert len(sample.answers) == num_answers
        for answer in sample.answers:
            assert sample.text.count(answer) == 1
            assert result[answer] in sample.answer_prefix
        if task != "niah_multivalue":
            assert len(set(result.values())) == len(result)
        assert len(result) >= {
            "niah_multikey_1": 4,
            "niah_multikey_2": 20,
            "niah_multikey_3": 7,
        }.get(task, num_answers)


@pytest.mark.parametrize(
    "task", ["niah_single_1", slow("niah_single_3"), "niah_multikey_2", "niah_multivalue"]
)
def test_depths_are_uniform(
    task: str, tokenizer: PreTrainedTokenizerBase, material: Material
) -> None:
    depths = []
    for sample in samples(task, 1024, 60, tokenizer, material):
        text = sample.prompt[sample.prompt.index("\n") + 1 : sample.prompt.rindex("\n")]
        for answer in sample.answers:
            end = text.index(answer) + len(answer) + 1
            start = text.rindex("A magic", 0, end)
            depths.append(start / (len(text) - (end - start)))
    assert kstest(depths, "uniform").pvalue > 0.01


def test_variables_lead_to_their_value(tokenizer: PreTrainedTokenizerBase) -> None:
    for length in (512, 2048):
        for sample in samples("vt", length, 10, tokenizer):
            problem = sample.text.split("\n\n")[-1]
            value = re.search(r"have the value (\d+)\?", problem)[1]  # type: ignore[index]
            assigned = dict(re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", problem))
            assert len(assigned) == problem.count("VAR ") - 4 == 5
            for name in sample.answers:
                while name in assigned:
                    name = assigned[name]
                assert name == value
            assert sample.text.count("\n\n") == 1  # after the worked example


@pytest.mark.parametrize(
    ("length", "often"), [(512, {3}), (1024, {6}), slow((2048, {6})), (4096, {6, 30}), (9000, {30})]
)
def test_common_words_are_the_most_common(
    length: int, often: set[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Words occur as often as in RULER where they fit."""
    for sample in samples("cwe", length, 1 if length > 4096 else 4, tokenizer):
        examples = sample.text.split("\n\n")
        entries = re.split(r" ?\d+\. ", examples[-1].split("\n")[1])[1:]
        counts = Counter(entries)
        most, least = max(counts.values()), min(counts.values())
        assert most in often
        assert {word for word, count in counts.items() if count == most} == set(sample.answers)
        assert least == (3 if most == 30 else 1)
        assert set(counts.values()) == {most, least}
        assert len(counts) >= 20
        assert length < 2048 or len(examples) == 2


@pytest.mark.parametrize("length", [512, 1024, 4096])
def test_frequent_words_are_the_most_frequent(
    length: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    for sample in samples("fwe", length, 5, tokenizer):
        ranked = Counter(sample.text.split("\n")[1].split(" ")).most_common()
        assert ranked[0][0] == "..."
        assert tuple(word for word, _ in ranked[1:4]) == sample.answers
        assert ranked[3][1] > ranked[4][1]
        assert ranked[0][1] / ranked[1][1] == pytest.approx(4, rel=0.1)


def test_questions_have_their_documents(
    tokenizer: PreTrainedTokenizerBase, material: Material
) -> None:
    questions = set()
    for task in ("qa_1", "qa_2"):
        for sample in samples(task, 1024, 8, tokenizer, material):
            question = sample.prompt.split("Question: ")[1]
            evidence = "Note" + question[12:-1] if task == "qa_1" else f"Title {question[6:-1]}\n"
            assert sample.prompt.count(evidence) == (2 if task == "qa_1" else 1)
            assert sample.answers == (("value", "the value") if task == "qa_1" else ("line",))
            questions.add(question)
    assert len(questions) == 16


def test_a_question_that_does_not_fit_is_replaced(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [
        {
            "question": f"Which {i}?",
            "answer": "x",
            "context": [["T", ["long " * (2000 if i % 2 else 5)]]],
        }
        for i in range(10)
    ]
    (tmp_path / "hotpot.json").write_text(json.dumps(rows))
    material = Material.read([], [str(tmp_path / "hotpot.json")])
    assert available(material)[-1] == "qa_2"
    numbers = {
        int(re.search(r"Which (\d)", one.prompt)[1])
        for one in samples("qa_2", 512, 10, tokenizer, material)
    }  # type: ignore[index]
    assert numbers <= {0, 2, 4, 6, 8}


def test_needles_are_at_their_depth() -> None:
    assert hide(["a", "b", "c"], ["X", "Y"], [0.99, 0.0], " ") == "Y a b c X"
    assert hide(["a", "b", "c"], ["X", "Y"], [0.3, 0.49]) == "a\nX\nY\nb\nc"
    line = (
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )
    assert noise(12) == [line, line, "The grass is green. The sky is blue."]
    assert noise(5) == [line]


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt"])
def test_noise_and_needles_are_on_separate_lines(
    task: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Needles, assignments and sentences of noise are one per line, as in RULER."""
    (sample,) = samples(task, 2048, 1, tokenizer)
    lines = sample.prompt.split("\n\n")[-1].split("\n")[1:-1]
    whole = re.compile(
        r"The grass is green\. .* again\.|A magic \w+ of [\w-]+ is [\w-]+\.|VAR [A-Z]{5} = [\w ]+\."
    )
    assert len(lines) > 15
    assert all(whole.fullmatch(line) for line in lines[:-1])
    assert whole.fullmatch(lines[-1]) or lines[-1].startswith("The grass is green.")


@pytest.mark.parametrize("material", [Material(), Material(Essays((("One", "sentence."),) * 20))])
def test_values_are_drawn_independently(
    material: Material, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two values may be equal, as in RULER; keys are distinct, so that a question has one answer."""
    monkeypatch.setitem(_DRAW, "number", lambda rng: str(rng.randrange(3)))
    for task in ("niah_multivalue", "niah_multiquery", "niah_multikey_2"):
        (sample,) = samples(task, 1024, 1, tokenizer, material)
        named = re.findall(r"A magic number of ([\w-]+) is (\d)\.", sample.prompt)
        values = [value for _, value in named]
        assert len(set(values)) < len(values)
        if task != "niah_multivalue":
            assert len({key for key, _ in named}) == len(named)


def test_a_long_list_of_words_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples longer than the list of words fill their length; a list of 800 in place of 8,166."""
    monkeypatch.setattr("spkv_nas.data.ruler.words.all_words", lambda: all_words()[:800])
    by_word = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    by_word.pre_tokenizer = pre_tokenizers.Whitespace()
    (sample,) = samples("cwe", 12_000, 1, PreTrainedTokenizerFast(tokenizer_object=by_word))
    assert sample.num_tokens + sample.new_tokens >= 0.97 * 12_000
    entries = re.split(r" ?\d+\. ", sample.text.split("\n\n")[1].split("\n")[1])[1:]
    counts = Counter(entries)
    assert {word for word, count in counts.items() if count == 30} == set(sample.answers)
    assert set(counts.values()) == {3, 30}
    assert len(counts) > 800


def test_essays_go_on_at_their_beginning() -> None:
    essays = Essays((("a", "b."), ("c", "d", "e."), ("f.",)))
    result = {tuple(essays.start(Random(seed))(8)) for seed in range(20)}
    assert result == {
        ("a b.", "c d e.", "f.", "a b."),
        ("c d e.", "f.", "a b.", "c d"),
        ("f.", "a b.", "c d e.", "f.", "a"),
    }


def test_words_equal_those_of_ruler() -> None:
    assert len(all_words()) == 8166
    assert np.all(np.diff([ord(word[0]) for word in all_words()]) >= 0)


@pytest.mark.parametrize(
    ("task", "length", "message"),
    [
        ("niah", 512, "unknown RULER task 'niah'"),
        ("qa_1", 512, "give --qa FILE.json in SQuAD format"),
        ("cwe", 128, "cwe needs at least"),
        ("fwe", 100, "100 are too few"),
    ],
)
def test_impossible_samples(
    task: str, length: int, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UserError, match=message):
        generate(task, 0, 0, length, tokenizer)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "[1]",
        '{"data": [{}]}',
        "nonsense",
        '[{"context": [["t", ["a"]]], "question": "b", "answer": null}]',
        '[{"context": [["t", ["a"]]], "question": "\\ud800", "answer": "c"}]',
    ],
)
def test_invalid_question_files(content: str, tmp_path: Path) -> None:
    (tmp_path / "qa.json").write_text(content)
    with pytest.raises(UserError, match=r"--qa .*qa.json: (neither|no question)"):
        Material.read([], [str(tmp_path / "qa.json")])


def test_essays_too_short_to_hide_in(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("One sentence.")
    with pytest.raises(UserError, match=r"--haystack .*one.txt: 1 sentences"):
        Material.read([str(tmp_path / "one.txt")], [])
