"""Test a checkpoint's answers to downstream tasks: independent of the batch size and of the code path."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import gated, tiny_model
from task_cases import CHOICES, WORDS, WRITING, hybrid, write_tasks
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

pytest.importorskip("lm_eval", reason="lm-eval is not installed (spkv-nas[tasks])")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from spkv_nas.base.errors import UserError
from spkv_nas.contrib.evaluate.tasks import language_model
from spkv_nas.contrib.evaluate.tasks.language_model import CheckpointLM
from spkv_nas.contrib.evaluate.tasks.stage import TaskResult, run_task
from spkv_nas.contrib.evaluate.tasks.suite import load_suite
from spkv_nas.model.attach import detach
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.config_section import gate_config
from spkv_nas.model.export.export import export
from spkv_nas.model.generation import generate
from spkv_nas.model.modes import gate_mode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "mine")


def dense() -> PreTrainedModel:
    return tiny_model(vocab_size=300)


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    names: str,
    kept: Path,
    **options: Any,
) -> list[TaskResult]:
    """Return the model's answers to tasks, with hard gates if it has any."""
    lm = CheckpointLM(model, tokenizer, **options)
    with nullcontext() if gate_config(model) is None else gate_mode(model, "hard", 0.5):
        suite = load_suite(names, [str(folder)], [], allow_code=False)
        return [run_task(lm, task, kept, "model") for entry in suite for task in entry.tasks]


class TestAnswers:
    @pytest.mark.parametrize("make", [gated, hybrid, dense], ids=["gates", "layout", "dense"])
    def test_one_at_a_time_and_eight_are_the_same(
        self,
        make: Callable[[], PreTrainedModel],
        folder: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        tmp_path: Path,
    ) -> None:
        names = "choices,writing,reading"
        alone, together = (
            ask(make(), tiny_tokenizer, folder, names, tmp_path / str(size), batch_size=size)
            for size in (1, 8)
        )
        for one, other in zip(alone, together, strict=True):
            assert one.values.keys() == other.values.keys()
            for metric in one.values:
                assert np.array(one.values[metric]) == pytest.approx(
                    np.array(other.values[metric]), rel=1e-5
                )
            assert one.density == other.density or math.isnan(one.density)
        expected = {gated: (0.1, 0.9), hybrid: (0.5, 0.5), dense: (math.nan, math.nan)}[make]
        low, high = expected
        assert all(low <= one.density <= high for one in alone) or math.isnan(low)
        assert [math.isnan(one.density) for one in alone] == [math.isnan(low)] * 3

    def test_likelihoods_are_those_of_the_whole_text(
        self, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model = gated()
        lm = CheckpointLM(model, tiny_tokenizer, batch_size=3)
        pairs = [
            ("the quick", " brown fox"),
            ("the quick brown", " dog"),
            ("the quick", " brown dog"),
            ("", "the dog"),
        ]
        requests = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
        with gate_mode(model, "hard", 0.5), torch.no_grad():
            result = lm.loglikelihood(requests)
            for (before, after), (total, is_greedy) in zip(pairs, result, strict=True):
                context = tiny_tokenizer(before)["input_ids"] or [lm.prefix_token_id]
                ids = (
                    context
                    + tiny_tokenizer(before + after)["input_ids"][len(context) * bool(before) :]
                )
                scores = (
                    model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
                )
                places = range(len(context), len(ids))
                assert total == pytest.approx(
                    sum(float(scores[n - 1, ids[n]]) for n in places), abs=1e-4
                )
                assert is_greedy == all(int(scores[n - 1].argmax()) == ids[n] for n in places)

    def test_a_prompt_that_does_not_fit_is_cut_at_its_start(
        self, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """The model has 128 positions."""
        lm = CheckpointLM(dense(), tiny_tokenizer)
        long = "the quick brown fox " * 60
        with pytest.warns(
            UserWarning,
            match="1 prompts do not fit, with their continuations, in the model's context of 128",
        ):
            ((cut, _),) = lm.loglikelihood([Instance("loglikelihood", {}, (long, " dog"), 0)])
        ids = torch.tensor([lm.tok_encode(long.rstrip() + "  dog")[-129:]])
        with torch.no_grad():
            scores = lm.model(input_ids=ids[:, :-1]).logits[0].log_softmax(-1)
        number = len(lm.tok_encode("  dog"))
        places = range(128 - number, 128)
        assert cut == pytest.approx(sum(float(scores[n, ids[0, n + 1]]) for n in places), abs=1e-4)
        kwargs = {"until": ["e"], "max_gen_toks": 8, "do_sample": False}
        with pytest.warns(UserWarning, match="1 prompts do not fit, with their continuations"):
            (text,) = lm.generate_until([Instance("generate_until", {}, (long, kwargs), 0)])
        (by_itself,) = lm.generate_until(
            [
                Instance(
                    "generate_until",
                    {},
                    (tiny_tokenizer.decode(tiny_tokenizer(long)["input_ids"][-120:]), kwargs),
                    0,
                )
            ]
        )
        assert text == by_itself

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            ("the fox", "", "the answer '' of 0 tokens"),
            ("", "", "the answer '' of 0 tokens"),
            ("the fox", " dog" * 200, "at most the model's context of 128"),
            ("", {"until": ["e"], "max_gen_toks": 4}, "the prompt '' of 0 tokens"),
        ],
    )
    def test_texts_without_tokens_and_too_long_answers(
        self, before: str, after: Any, message: str, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Empty answers had probability 1; others ended in an IndexError or a RuntimeError."""
        lm = CheckpointLM(dense(), tiny_tokenizer)
        ask_lm = lm.loglikelihood if isinstance(after, str) else lm.generate_until
        with pytest.raises(UserError, match=message):
            ask_lm([Instance("loglikelihood", {}, (before, after), 0)])

    def test_a_tokenizer_without_end_of_text(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.eos_token = None
        with pytest.raises(UserError, match="need a tokenizer with an end-of-text token"):
            CheckpointLM(dense(), tokenizer)

    def test_generation_ends_at_its_stop_sequence(
        self, folder: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model = gated()
        lm = CheckpointLM(model, tiny_tokenizer, batch_size=8)
        kwargs = {"until": ["e", "o"], "max_gen_toks": 20, "do_sample": False}
        prompts = [" ".join(WORDS[: 2 + n]) for n in range(8)]
        with gate_mode(model, "hard", 0.5):
            written = lm.generate_until(
                [
                    Instance("generate_until", {}, (prompt, kwargs), n)
                    for n, prompt in enumerate(prompts)
                ]
            )
        for prompt, text in zip(prompts, written, strict=True):
            whole = generate(model, tiny_tokenizer, prompt, max_new_tokens=20, tau=0.5).text
            cut = min(
                (whole.index(stop) for stop in ("e", "o") if stop in whole), default=len(whole)
            )
            assert text == whole[:cut]

    def test_density_counts_real_tokens(self, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        """The density follows from each gate's logits over all generated tokens but the last."""
        model = gated()
        lm = CheckpointLM(model, tiny_tokenizer, batch_size=8)
        kwargs = {"until": [" "], "max_gen_toks": 12, "do_sample": False}
        prompts = [" ".join(WORDS[: 2 + 3 * n]) for n in range(4)]
        counts = []
        with gate_mode(model, "hard", 0.5):
            for some in ([prompt] for prompt in prompts):
                lm.start()
                (text,) = lm.generate_until([Instance("generate_until", {}, (some[0], kwargs), 0)])
                lengths = (
                    len(tiny_tokenizer(some[0])["input_ids"]),
                    len(tiny_tokenizer(text)["input_ids"]),
                )
                counts.append((lm.stop(), sum(lengths)))
            lm.start()
            lm.generate_until(
                [Instance("generate_until", {}, (one, kwargs), n) for n, one in enumerate(prompts)]
            )
            together = lm.stop()
        densities, sizes = np.array(counts).T
        assert densities.min() <= together <= densities.max()
        assert densities.std() > 0
        assert together == pytest.approx((densities * sizes).sum() / sizes.sum(), abs=0.02)

    def test_at_tau_0_gates_are_open(
        self, folder: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        model = gated()
        lm = CheckpointLM(model, tiny_tokenizer)
        suite = load_suite("choices,writing", [str(folder)], [], allow_code=False)
        with gate_mode(model, "hard", 0.0):
            kept = [run_task(lm, entry.tasks[0], tmp_path / "0", "model") for entry in suite]
        detach(model)
        lm = CheckpointLM(model, tiny_tokenizer)
        plain = [run_task(lm, entry.tasks[0], tmp_path / "open", "model") for entry in suite]
        assert [one.density for one in kept] == [1.0, 1.0]
        assert [one.values for one in kept] == [one.values for one in plain]
        assert samples(tmp_path / "0") == pytest.approx(samples(tmp_path / "open"), abs=1e-5)

    @pytest.mark.slow
    def test_a_native_export_gives_the_same(
        self, folder: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        """Full attention and a layout of whole layers give the same results in plain transformers."""
        for name, make in {"dense": dense, "hybrid": hybrid}.items():
            save(make(), tiny_tokenizer, tmp_path / name)
            exported = tmp_path / name
            if make is hybrid:
                exported = tmp_path / "stock"
                export(None, tmp_path / name, exported)
            ours, plain = load(tmp_path / name)[0], AutoModelForCausalLM.from_pretrained(exported)
            assert (type(ours) is type(plain)) == (make is dense)
            result = [
                ask(model, tiny_tokenizer, folder, "choices", tmp_path / f"{name}{n}")
                for n, model in enumerate((ours, plain))
            ]
            assert_close(result[0][0].values, result[1][0].values, 1e-5)
            assert samples(tmp_path / f"{name}0") == pytest.approx(
                samples(tmp_path / f"{name}1"), abs=1e-4
            )

    @pytest.mark.slow
    @pytest.mark.parametrize("work", ["_read", "_generate"])
    def test_out_of_memory_reduces_the_batch(
        self,
        work: str,
        folder: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Counts of a failed pass are discarded."""
        names = {"_read": "choices", "_generate": "writing"}[work]
        (whole,) = ask(gated(), tiny_tokenizer, folder, names, tmp_path / "whole")
        done = getattr(CheckpointLM, work)

        def short(self: CheckpointLM, items: Any, *rest: Any, **options: Any) -> Any:
            result = done(self, items, *rest, **options)
            if len(items) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return result

        monkeypatch.setattr(CheckpointLM, work, short)
        with pytest.warns(UserWarning, match="out of memory for"):
            (result,) = ask(gated(), tiny_tokenizer, folder, names, tmp_path / "short")
        assert (result.values, result.density) == (whole.values, whole.density)


class TestRandomness:
    @pytest.mark.parametrize("kind", ["choices", "writing"])
    def test_prompts_and_answers_depend_on_the_seed_alone(
        self, kind: str, folder: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        """Requests were built twice from a generator that had moved on, and sampling was not seeded."""
        text = {"choices": CHOICES, "writing": WRITING}[kind].replace("FOLDER", str(folder))
        text = (
            text.replace(f"task: {kind}", "task: drawn")
            + "num_fewshot: 2\nfewshot_split: test\nrepeats: 2\n"
        )
        text = text.replace("do_sample: false", "do_sample: true, temperature: 1.0")
        if kind == "choices":
            text += "process_docs: !function drawn.shuffle\n"
            (folder / "drawn.py").write_text(
                "import random, datasets\n\ndef shuffle(rows):\n    new = []\n    for row in rows:\n"
                "        right = row['choices'][row['answer']]\n        mixed = random.sample(row['choices'], 3)\n"
                "        new.append({**row, 'choices': mixed, 'answer': mixed.index(right)})\n"
                "    return datasets.Dataset.from_list(new)\n"
            )
        (folder / "drawn.yaml").write_text(text)
        lm = CheckpointLM(tiny_model(vocab_size=300, max_position_embeddings=512), tiny_tokenizer)
        (entry,) = load_suite("drawn", [str(folder)], [], allow_code=False)
        kept = []
        for name in ("first", "second"):
            run_task(lm, entry.tasks[0], tmp_path / name, "model")
            (file,) = (tmp_path / name).iterdir()
            kept.append(file.read_text())
        assert kept[0] == kept[1]
        rows = [json.loads(line) for line in kept[0].splitlines()[1:]]
        if kind == "writing":
            assert any(one != other for row in rows for one, other in row["resps"])
            manager = TaskManager(include_path=str(folder), include_defaults=False)
            theirs = simple_evaluate(lm, tasks=["drawn"], task_manager=manager, bootstrap_iters=0)
            prompts = [row["arguments"][0][0] for row in theirs["samples"]["drawn"]]
            assert [row["prompt"] for row in rows] == prompts
        else:  # the shuffled choices that are scored are those asked
            originals = map(json.loads, (folder / "choices.jsonl").read_text().splitlines())
            right = [f" {row['choices'][row['answer']]}" for row in originals]
            assert [row["asked"][row["target"]][0] for row in rows] == right

    def test_processes_draw_other_samples(
        self, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Processes with the same seed gave the same answer to both copies of a repeated prompt."""
        lm, texts = CheckpointLM(dense(), tiny_tokenizer), []
        kwargs = {"until": ["~"], "max_gen_toks": 16, "do_sample": True}
        monkeypatch.setattr(language_model.distributed, "gathered", lambda results: [results])
        for process in range(2):
            monkeypatch.setattr(
                language_model.distributed,
                "own_share",
                lambda number, start=process: range(start, start + 1),
            )
            torch.manual_seed(0)
            texts += lm.generate_until(
                [Instance("generate_until", {}, ("the quick", kwargs), n) for n in range(2)]
            )
        assert texts[0] != texts[1]


def assert_close(first: Any, second: Any, tolerance: float) -> None:
    """Assert that two results have the same metrics, and values up to a tolerance."""
    if not isinstance(first, dict):
        assert first == pytest.approx(second, abs=tolerance)
        return
    assert first.keys() == second.keys()
    for key, values in first.items():
        assert_close(values, second[key], tolerance)


def samples(folder: Path) -> list[float]:
    """Collect all log-probabilities stored below a folder."""
    rows = [
        json.loads(line)
        for file in sorted(folder.glob("choices*"))
        for line in file.read_text().splitlines()[1:]
    ]
    return [answer[0] for row in rows for (answer,) in row["resps"]]


class TestFinished:
    def test_stored_answers_are_reused(
        self,
        folder: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        first = ask(gated(), tiny_tokenizer, folder, "choices,writing,reading", tmp_path / "kept")
        monkeypatch.setattr(CheckpointLM, "_read", None)
        monkeypatch.setattr(CheckpointLM, "_generate", None)
        again = ask(gated(), tiny_tokenizer, folder, "choices,writing,reading", tmp_path / "kept")
        assert [one.was_kept for one in (*first, *again)] == [False] * 3 + [True] * 3
        for one, other in zip(first, again, strict=True):
            assert (one.values, one.density) == (other.values, other.density)

    def test_file_names_identify_what_answers_depend_on(
        self, folder: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        lm = CheckpointLM(dense(), tiny_tokenizer)

        def run(identity: str = "a", limit: int | None = None) -> int:
            (entry,) = load_suite("choices", [str(folder)], [], allow_code=False)
            run_task(lm, entry.tasks[0], tmp_path / "kept", identity, limit=limit)
            return len(list((tmp_path / "kept").iterdir()))

        assert [run(), run(), run("b"), run(limit=3)] == [1, 1, 2, 3]
        rows = (folder / "choices.jsonl").read_text()
        (folder / "choices.jsonl").write_text(rows.replace("lazy fox", "lazy cat"))
        assert run() == 4
        (folder / "choices.yaml").write_text(
            CHOICES.replace("FOLDER", str(folder)).replace("{metric: acc}, ", "")
        )
        assert run() == 5

    def test_every_sample_is_there(
        self, folder: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        (result,) = ask(gated(), tiny_tokenizer, folder, "choices", tmp_path / "kept")
        (file,) = (tmp_path / "kept").iterdir()
        head, *rows = map(json.loads, file.read_text().splitlines())
        assert head == {"task": "choices", "num_fewshot": 0, "density": result.density}
        assert [row["metrics"]["acc"] for row in rows] == result.values["acc"]
        assert rows[0]["prompt"] == "the quick brown"
        assert rows[0]["asked"] == [[" the"], [" dog"], [" the lazy fox"]]
