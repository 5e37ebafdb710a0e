"""Test answers that models write: how they are read, encoded, written with a kept cache, and scored."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from verdict_cases import check_resumes, decisive_model, run, write_folder

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.data.tokenizer import END_OF_TEXT, train_bpe
from spkv_nas.evaluation.answers import conversations, judges
from spkv_nas.evaluation.answers.conversations import Encoded, answer, encode
from spkv_nas.evaluation.answers.needles import NeedleQuestions, NeedleRounds
from spkv_nas.evaluation.answers.questions import Conversation, read_questions
from spkv_nas.evaluation.answers.rounds import AnswerRounds
from spkv_nas.evaluation.verdict.criterion import Setting
from spkv_nas.model.windows import layout_applied
from spkv_nas.stages import decision

TEMPLATE = (
    "{% if tools %}{{ tools }}{% endif %}"
    "{% for m in messages %}<|endoftext|>{{ m['role'] }}: {{ m['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>assistant: {% endif %}"
)
USER = {"role": "user", "content": "What is 7?"}


def write_questions(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(tmp_path: Path, *rows: Any) -> list[Conversation]:
    return read_questions(write_questions(tmp_path / "questions.jsonl", *rows))


@pytest.fixture(scope="module")
def chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = train_bpe(["user: assistant: What is it? It is"] * 3, 290)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return decisive_model()


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("judge", "right", "wrong"),
    [
        (judges.ExactMatch(("Paris",)), ["paris.", " **Paris**\n"], ["Paris, France", ""]),
        (judges.ExactMatch(("a + b",), first_line=True), [" a  + b\n\ndef c"], ["a - b"]),
        (judges.PatternMatch(r"\b4\b"), ["It is 4."], ["It is 44."]),
        (
            judges.SchemaFit(SCHEMA),
            ['{"n": 1}', '```json\n{"n": 2}\n```'],
            ['{"n": "1"}', 'It is {"n": 1}', '{"n": 1', "[" * 10_000],
        ),
        (
            judges.ToolCall("add", {"a": 1, "b": [2]}),
            [
                '<tool_call>{"name": "add", "arguments": {"b": [2], "a": 1}}</tool_call>',
                '[{"name": "add", "parameters": {"a": 1, "b": [2]}}]',
                '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2]}"}',
            ],
            [
                '{"name": "add", "arguments": {"a": 1}}',
                '{"name": "sub", "arguments": {"a": 1, "b": [2]}}',
                "add(1, [2])",
            ],
        ),
    ],
    ids=["answer", "prompt", "pattern", "schema", "call"],
)
def test_judges(judge: judges.Judge, right: list[str], wrong: list[str]) -> None:
    assert [judge.score(text) for text in right] == [1.0] * len(right)
    assert [judge.score(text) for text in wrong] == [0.0] * len(wrong)
    assert judges.ContainedShare(("12", "34")).score("12 and 35") == 0.5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompts": "a"}, "unknown key 'prompts'; did you mean 'prompt'?"),
        ({"prompt": 1}, "key 'prompt': .*string; found 1"),
        ({}, "give messages, for the model's chat template, or a prompt to continue"),
        ({"prompt": "a", "messages": [USER]}, "give messages, for the model's"),
        ({"prompt": " "}, "a prompt is empty"),
        ({"prompt": "a", "answer": "b", "pattern": "b"}, "answer and pattern: keep one"),
        ({"prompt": "a", "answer": " . "}, "the answer is empty"),
        ({"prompt": "a", "pattern": "("}, "pattern '\\('.*correct the regular expression"),
        ({"prompt": "a", "schema": {"type": "thing"}}, "no JSON Schema: type: 'thing'"),
        ({"prompt": "a", "choices": ["b", "b"]}, "at least two different texts"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": "d"}, "'d' is none of the choices"),
        ({"prompt": "a", "choices": ["b", "c"], "pattern": "b"}, "leave pattern out"),
        ({"messages": [{"content": "a"}]}, "a message has no role"),
        ({"messages": [USER, {"role": "assistant", "content": "7"}]}, "messages must end with"),
        ({"prompt": "a", "tools": [{}]}, "tools need messages"),
        (
            {"prompt": "a", "then": [{"prompt": "b", "answers": "c"}]},
            "unknown key 'then.0.answers'",
        ),
        (["a"], "expected a JSON object"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"questions.jsonl, line 2: .*{message}"):
        read(tmp_path, {"prompt": "right"}, row)


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('\n{"prompt": "a"')
    with pytest.raises(UserError, match=r"broken.jsonl, line 2: not valid JSON: .*one object"):
        read_questions(tmp_path / "broken.jsonl")
    with pytest.raises(UserError, match=r"questions.jsonl: no questions"):
        read(tmp_path)
    with pytest.raises(UserError, match="questions not found"):
        read_questions(tmp_path / "gone.jsonl")


class TestEncoding:
    def test_turns_add_up_to_what_the_template_writes(
        self, tmp_path: Path, chat_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Special tokens of the template are special; those that a message spells are text."""
        spelled = {"role": "user", "content": f"What is {END_OF_TEXT}?"}
        [conversation] = read(
            tmp_path, {"messages": [spelled], "then": [{"prompt": "Why?"}, {"prompt": "So?"}]}
        )
        turns = encode(conversation, chat_tokenizer).turns
        own = chat_tokenizer("It is 7", add_special_tokens=False)["input_ids"]
        joined = [*turns[0].tokens, *own, *turns[1].tokens, *own, *turns[2].tokens]
        assert chat_tokenizer.decode(joined) == (
            f"{END_OF_TEXT}user: What is {END_OF_TEXT}?{END_OF_TEXT}assistant: It is 7"
            f"{END_OF_TEXT}user: Why?{END_OF_TEXT}assistant: It is 7"
            f"{END_OF_TEXT}user: So?{END_OF_TEXT}assistant: "
        )
        end = chat_tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        assert joined.count(end) == 6, "the template's, but not that in the message"

    def test_a_model_without_a_template(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        [conversation] = read(tmp_path, {"messages": [USER]})
        with pytest.raises(UserError, match=r"line 1 holds chats, .*no chat template: give texts"):
            encode(conversation, tiny_tokenizer)

    def test_choices_of_a_text_begin_with_a_space(
        self, tmp_path: Path, chat_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        texts = []
        rows: list[dict[str, Any]] = [
            {"prompt": "It is"},
            {"prompt": "It is "},
            {"messages": [USER]},
        ]
        for row in rows:
            [conversation] = read(tmp_path, {**row, "choices": ["it", "user"]})
            [turn] = encode(conversation, chat_tokenizer).turns
            texts.append([chat_tokenizer.decode(choice) for choice in turn.choices])
        assert texts == [[" it", " user"], ["it", "user"], ["it", "user"]]


class TestAnswering:
    def encoded(
        self, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, *rows: Any
    ) -> list[Encoded]:
        return [encode(conversation, tokenizer) for conversation in read(tmp_path, *rows)]

    def greedy(self, model: PreTrainedModel, context: list[int], number: int) -> list[int]:
        """Return tokens that are predicted one by one, without a cache."""
        tokens = [*context]
        for _ in range(number):
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
        return tokens[len(context) :]

    @pytest.mark.parametrize("is_local", [False, True])
    def test_later_turns_continue_the_same_context(
        self,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel,
        is_local: bool,
    ) -> None:
        """With the kept cache, also of a layout, as token by token without one."""
        rows = [
            {"prompt": "the quick brown", "then": [{"prompt": " lazy"}, {"prompt": " dog"}]},
            {"prompt": "fox"},
            {"prompt": "over the lazy dog"},
        ]
        conversations = self.encoded(tmp_path, tiny_tokenizer, *rows)
        heads = "LG" if is_local else "GG"
        with layout_applied(model, Layout((heads,) * 4, window=4)):
            answers = answer(model, tiny_tokenizer, conversations, 5)
            for conversation, written in zip(conversations, answers, strict=True):
                context: list[int] = []
                for turn, tokens in zip(conversation.turns, written, strict=True):
                    context += turn.tokens
                    assert tokens == self.greedy(model, context, 5)
                    context += tokens

    def test_an_end_of_text_is_not_written_twice(
        self,
        tmp_path: Path,
        chat_tokenizer: PreTrainedTokenizerBase,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from spkv_nas.model import generation

        end = chat_tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        contexts = []

        def ended(
            _model: Any, _tokenizer: Any, prompts: Any, *_: Any, **__: Any
        ) -> list[list[int]]:
            contexts.append(prompts[0].tolist())
            return [[7, end]]

        monkeypatch.setattr(generation, "continue_tokens", ended)
        conversations = self.encoded(
            tmp_path, chat_tokenizer, {"messages": [USER], "then": [{"prompt": "Why?"}]}
        )
        model = decisive_model()
        model.generation_config.eos_token_id = [299, end]
        answer(model, chat_tokenizer, conversations, 5)
        first, second = contexts
        added = second[len(first) :]
        assert added[:2] == [7, end]
        assert added.count(end) == 2, "of the first answer and before the second one"

    def test_choices_are_the_only_answers(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
    ) -> None:
        rows = [{"prompt": "fox", "choices": ["jumps", "jumped", "over"]}, {"prompt": "the fox"}]
        [[chosen], [free]] = answer(
            model, tiny_tokenizer, self.encoded(tmp_path, tiny_tokenizer, *rows), 8
        )
        assert tiny_tokenizer.decode(chosen, skip_special_tokens=True).strip() in rows[0]["choices"]
        assert chosen[-1] == 299
        [conversation] = self.encoded(tmp_path, tiny_tokenizer, rows[1])
        assert free == self.greedy(model, [*conversation.turns[0].tokens], 8)

    def test_scores_without_a_judge_are_the_tokens_up_to_the_first_difference(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
    ) -> None:
        conversations = read(
            tmp_path,
            {"prompt": "the quick brown fox jumps over", "pattern": "."},
            *({"prompt": f"{word} fox jumps over the lazy"} for word in ("the", "a", "one")),
        )
        rounds = AnswerRounds(conversations, Setting(model, tiny_tokenizer, None), 6, "")
        dense = rounds.measure_all(0, model, {})
        assert dense["score"].tolist() == [1.0] * 4
        assert dense["lengths"].tolist() == [6] * 4
        with layout_applied(model, Layout(("LL",) * 4, window=2)):
            local = rounds.measure_all(0, model, {"written": dense["written"]})
            again = rounds.measure_all(0, model, {})["written"]
        is_same = (again == dense["written"]).cumprod(1).sum(1) / 6
        expected = [1.0, *is_same[1:].tolist()]
        assert local["score"].tolist() == pytest.approx(expected)
        assert min(expected) < 1.0


class TestNeedles:
    def questions(self, tokenizer: PreTrainedTokenizerBase, length: int = 900) -> NeedleQuestions:
        return NeedleQuestions(tokenizer, length, 12, 0)

    @pytest.mark.parametrize("is_chat", [False, True])
    def test_conversations_fill_the_length_with_their_answers(
        self,
        tiny_tokenizer: PreTrainedTokenizerBase,
        chat_tokenizer: PreTrainedTokenizerBase,
        is_chat: bool,
    ) -> None:
        tokenizer = chat_tokenizer if is_chat else tiny_tokenizer
        questions = self.questions(tokenizer)
        kinds = set()
        for conversation in questions[:]:
            encoded = encode(conversation, tokenizer)
            length = encoded.num_tokens + len(encoded.turns) * questions.new_tokens
            assert 850 <= length <= 900
            text = tokenizer.decode(encoded.turns[0].tokens)
            values = []
            for turn in conversation.turns:
                assert isinstance(turn.judge, judges.ContainedShare)
                assert all(f"is {value}." in text for value in turn.judge.values)
                values.append(len(turn.judge.values))
            kinds.add(tuple(values))
            assert text.endswith((" is", " are"))
            assert text.startswith(END_OF_TEXT + "user") == is_chat
        assert kinds == {(1,), (2,), (1, 1)}
        assert questions[3:5] == self.questions(tokenizer)[:][3:5]
        with pytest.raises(UserError, match=r"needles needs at least \d+ tokens"):
            self.questions(tokenizer, 200)[:4]

    def test_a_model_that_finds_few_is_no_judge(
        self, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        setting = Setting(decisive_model(), tiny_tokenizer, None)
        rounds = NeedleRounds(self.questions(tiny_tokenizer), setting)
        asked = []

        def score(found: float, number: int) -> np.ndarray:
            asked.append(number)
            return np.full(4 * number, found)

        rounds.check_dense(partial(score, 0.7))
        assert asked == [1, 2, 3]
        with pytest.raises(UserError, match=r"finds 50 % .* 900 tokens hide.*\n.*recall=10"):
            rounds.check_dense(partial(score, 0.5))
        asked.clear()
        with pytest.raises(UserError, match=r"finds 0 % of the numbers"):
            rounds.check_dense(partial(score, 0.0))
        assert asked == [1], "one round is enough"

    def test_numbers_that_both_models_find_are_scored(
        self, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The dense model writes all numbers of its first questions, a candidate half of them."""
        questions = self.questions(tiny_tokenizer)
        values = [
            value
            for conversation in questions[:4]
            for turn in conversation.turns
            if isinstance(turn.judge, judges.ContainedShare)
            for value in turn.judge.values
        ]

        def write(share: float) -> None:
            written = " ".join(values[: int(share * len(values))])
            tokens = tiny_tokenizer(written)["input_ids"]
            monkeypatch.setattr(
                conversations,
                "answer",
                lambda _m, _t, asked, _n: [[tokens] * len(e.turns) for e in asked],
            )

        rounds = NeedleRounds(questions, Setting(decisive_model(), tiny_tokenizer, None))
        write(1.0)
        dense = rounds.measure_all(0, decisive_model(), {})
        assert dense["score"].tolist() == [1.0] * 4
        write(0.5)
        local = rounds.measure(0, decisive_model(), dense)
        assert 0.0 < local.mean() < 1.0
        note = rounds.note(np.stack([local, dense["score"]], 1), lambda _: ([], []))
        assert note.endswith("of the numbers that 900 tokens hide, dense model 100.0 %")


class TestVerdict:
    @pytest.fixture(autouse=True)
    def folder(
        self,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write_folder(tiny_tokenizer)
        rows = [{"prompt": f"the quick brown fox number {number} jumps"} for number in range(40)]
        write_questions(Path("questions.jsonl"), *rows)

    MARGIN = "answers=30:file=questions.jsonl:new-tokens=6"

    def test_full_attention_passes_and_local_layers_fail(self) -> None:
        result = run("full.yaml", "three-to-one.yaml", margin=self.MARGIN)
        assert result.answers == {"full": "passes", "three-to-one": "fails"}
        assert result.notes["full"]["answers"] == (
            "score 100.0 %, dense model 100.0 %; answers 1.00 times as long, "
            "100.0 % of them at the limit of 6 tokens, dense model 100.0 %"
        )
        page = (result.folder / "verdict.yaml").read_text()
        assert "answers 1.00 times as long" in page

    def test_the_first_alternative_that_judges_the_model_counts(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Blocks of 32 tokens hold no needle question, but a passage that occurs again."""
        with pytest.raises(UserError, match="RULER's needles needs at least"):
            run("full.yaml", margin="needles=5")
        result = run("full.yaml", margin="needles=5|recall=50:distance=20")
        assert result.rows["criterion"].tolist() == ["recall"]
        assert "of passages that occur again, dense model" in result.notes["full"]["recall"]
        caplog.clear()
        result = run("full.yaml", margin="nll=20%,needles=5|recall=50:distance=25", max_tokens=1024)
        assert result.rows["criterion"].tolist() == ["nll"]
        assert "needles and recall judge nothing of this model and text" in caplog.text
        with pytest.raises(UserError, match="25 apart"):
            run("full.yaml", margin="needles=5|recall=50:distance=25")
        with pytest.raises(UserError, match="recall has two margins"):
            run("full.yaml", margin="recall=5,needles=5|recall=50")

    def test_rows_of_other_criteria_have_no_displacement(self) -> None:
        """A missing number of compared tokens, which is None in a column of whole numbers, ended the command."""
        result = run("full.yaml", margin="nll=20%,recall=50:distance=20", max_tokens=1024)
        nll, recall = decision.measured_by(result.compared, result)
        assert nll.displacement is not None
        assert recall.displacement is None
        assert recall.note.endswith("%")

    @pytest.mark.slow
    def test_an_interrupted_verdict_gives_the_same_bytes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check_resumes(AnswerRounds, monkeypatch, "three-to-one.yaml", margin=self.MARGIN)

    def test_what_cannot_be_asked_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"needs questions: answers=5:file=questions.jsonl"):
            run("full.yaml", margin="answers=5")
        write_questions(Path("long.jsonl"), {"prompt": "the " * 4000})
        with pytest.raises(UserError, match=r"long.jsonl, line 1: give a shorter text, or fewer"):
            run("full.yaml", margin="answers=5:file=long.jsonl")
        write_questions(Path("wide.jsonl"), {"prompt": "the", "choices": ["quick brown", "fox"]})
        with pytest.raises(UserError, match=r"wide.jsonl, line 1: a choice has \d+ tokens"):
            run("full.yaml", margin="answers=5:file=wide.jsonl:new-tokens=2")
