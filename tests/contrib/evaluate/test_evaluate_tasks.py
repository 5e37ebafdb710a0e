"""Test the tasks command: which tasks run, where their data is, and what happens to the answers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from helpers import MessageLog, fails, gated
from task_cases import WORDS, WRITING, hybrid, write_tasks
from transformers import PreTrainedTokenizerBase

pytest.importorskip("lm_eval", reason="lm-eval is not installed (spkv-nas[tasks])")

from spkv_nas.artifacts.result_tables import TASKS
from spkv_nas.base.errors import UserError
from spkv_nas.base.statistics import unseen_share
from spkv_nas.cli import main
from spkv_nas.contrib.evaluate.tasks.documents import by_article
from spkv_nas.contrib.evaluate.tasks.options import TasksOptions
from spkv_nas.contrib.evaluate.tasks.stage import Results, TaskResult, run, tasks_table
from spkv_nas.contrib.evaluate.tasks.suite import SelectedTasks, load_suite
from spkv_nas.data.tokenizer import train_bpe
from spkv_nas.model.checkpoint import save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "mine")


class TestTable:
    def answers(self, *values: float, density: float = 0.25, **others: Any) -> TaskResult:
        return TaskResult({"acc": list(values), **others}, density)

    def entry(self, folder: Path, name: str) -> SelectedTasks:
        (entry,) = load_suite(name, [str(folder)], [], allow_code=False)
        return entry

    def test_rows_are_means_with_paired_errors(self, folder: Path) -> None:
        first = self.answers(1, 0, 1, 1, acc_norm=[1, 1, 1, 1])
        other = self.answers(0, 0, 1, 0, density=0.5, acc_norm=[0] * 4)
        choices = self.entry(folder, "choices")
        rows = tasks_table(
            [
                Results(choices, [first], [other]),
                Results(choices, [self.answers(1, 0, 0, 0)], [other]),
            ]
        )
        assert list(rows.columns) == TASKS.header
        assert list(rows["task"]) == ["choices"] * 3 + ["average of 2"]
        error, pair = np.std([1, 0, 1, 1], ddof=1) / 2, np.std([1, 0, 0, 1], ddof=1) / 2
        assert list(rows.iloc[0, 1:]) == [
            "acc",
            0,
            4,
            0.75,
            pytest.approx(error),
            0.25,
            0.25,
            0.5,
            0.5,
            pytest.approx(pair),
        ]
        # An error of 0 would say that no other sample differs
        alike = pytest.approx(unseen_share(4) / 1.96)
        assert list(rows.iloc[1, 1:]) == ["acc_norm", 0, 4, 1, alike, 0.25, 0, 0.5, 1, alike]
        second = np.std([1, 0, 0, 0], ddof=1) / 2
        assert list(rows.loc[3, ["num_samples", "value", "difference"]]) == [8, 0.5, 0.25]
        assert rows.loc[3, "standard_error"] == pytest.approx(math.hypot(error, second) / 2)

    def test_a_group_is_one_row(self, folder: Path) -> None:
        """Its score is the mean over its tasks, weighted by samples."""
        both = self.entry(folder, "both")
        assert [len(task.eval_docs) for task in both.tasks] == [11, 4]
        rows = tasks_table([Results(both, [self.answers(1, 1, 1), self.answers(0, density=0.65)])])
        assert list(rows.loc[0, ["task", "metric", "num_samples", "value", "density"]]) == [
            "both",
            "acc",
            4,
            0.75,
            0.35,
        ]
        assert rows.iloc[0, 7:].isna().all()
        rows = tasks_table(
            [Results(replace(both, by_size=False), [self.answers(1, 1, 1), self.answers(0)])]
        )
        assert rows.loc[0, "value"] == 0.5

    def test_a_group_without_mean_shows_its_tasks(self, folder: Path) -> None:
        (folder / "loose.yaml").write_text("group: loose\ntask: [choices, few]\n")
        loose = load_suite("loose", [str(folder)], [], allow_code=False)
        assert [(entry.name, len(entry.tasks)) for entry in loose] == [("choices", 1), ("few", 1)]

    def test_measures_other_than_means_have_an_error(self, folder: Path) -> None:
        """Perplexity by words: two models equal in every sample differ by 0 with certainty."""
        rng = np.random.default_rng(0)
        values = [
            [-float(size) * 2 - float(rng.normal()), int(size)] for size in rng.integers(5, 50, 40)
        ]
        (task,) = self.entry(folder, "reading").tasks
        whole = task.aggregation()["word_perplexity"]
        first = TaskResult({"word_perplexity": values}, 0.5, {"word_perplexity": whole})
        other = replace(
            first, values={"word_perplexity": [[2 * total, size] for total, size in values]}
        )
        rows = tasks_table([Results(SelectedTasks("reading", [task]), [first], [other])])
        assert rows.loc[0, "value"] == pytest.approx(
            math.exp(-sum(t for t, _ in values) / sum(s for _, s in values))
        )
        ratios = np.array([(-total, size) for total, size in values])
        spread = (ratios[:, 0] - ratios[:, 0].sum() / ratios[:, 1].sum() * ratios[:, 1]).std(ddof=1)
        expected = rows.loc[0, "value"] * spread * math.sqrt(40) / ratios[:, 1].sum()
        assert rows.loc[0, "standard_error"] == pytest.approx(expected, rel=0.3)
        assert rows.loc[0, "difference"] < -40
        same = tasks_table([Results(SelectedTasks("reading", [task]), [first], [first])])
        assert list(same.loc[0, ["difference", "difference_standard_error"]]) == [0, 0]
        mixed = tasks_table(
            [
                Results(SelectedTasks("reading", [task]), [first]),
                Results(self.entry(folder, "choices"), [self.answers(1)]),
            ]
        )
        # A perplexity and a share have no average
        assert list(mixed["task"]) == [
            "reading",
            "choices",
        ]


class TestData:
    @pytest.mark.slow
    def test_a_local_copy_is_found_by_its_id(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Two of the paper's tasks: one with few examples, one with a separate index."""
        piqa = tmp_path / "baber" / "piqa"
        piqa.mkdir(parents=True)
        rows = [
            {"goal": " ".join(WORDS[:n]), "sol1": "dog", "sol2": "lazy fox", "label": n % 2}
            for n in range(2, 8)
        ]
        for split in ("train", "validation"):
            (piqa / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (result,) = load_suite("piqa", [], [str(tmp_path)], allow_code=False)
        assert [len(task.eval_docs) for task in result.tasks] == [6]
        with pytest.raises(
            UserError, match=r"no data for 1 of 2 tasks: race_middle \(ehovy/race\)"
        ):
            load_suite("piqa,race_middle", [], [str(tmp_path)], allow_code=False)

    def test_race_questions_are_grouped_by_article(self, tmp_path: Path) -> None:
        folder = tmp_path / "ehovy" / "race"
        (folder / "middle").mkdir(parents=True)
        rows = [
            {
                "example_id": f"middle{n // 2}.txt",
                "article": f"Article {n // 2}.",
                "question": f"Q{n}?",
                "answer": "B",
                "options": [f"{n}a", f"{n}b", f"{n}c", f"{n}d"],
            }
            for n in range(4)
        ]
        (folder / "middle" / "test.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: middle\n  data_files:\n  - split: test\n    path: middle/test.jsonl\n---\n"
        )
        (entry,) = load_suite("race_middle", [], [str(tmp_path)], allow_code=False)
        (task,) = entry.tasks
        task.build_all_requests(rank=0, world_size=1)
        assert len(task.instances) == 2 * 4
        prompt, choice = task.instances[1].args
        assert prompt == "Article: Article 0.\n\nQuestion: Q0?\nAnswer: 0b\nQ1?"
        assert choice == " 1b"
        assert len(by_article(rows)) == 2

    def test_the_shipped_task_has_names_from_afar(self) -> None:
        rows = [
            doc
            for entry in load_suite("stdlib_completions", [], [], allow_code=False)
            for doc in entry.tasks[0].eval_docs
        ]
        assert len(rows) == 200
        for row in rows:
            assert len(set(row["choices"])) == 4
            assert row["answer"] in row["choices"]
            ends = {word[0]: word.end() for word in re.finditer(r"\w+", row["context"])}
            assert all(ends[name] <= len(row["context"]) - 150 for name in row["choices"])
        assert 30 < sum(row["choices"].index(row["answer"]) == 0 for row in rows) < 70


class TestCommand:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
        save(gated(), tiny_tokenizer, tmp_path / "model")
        return tmp_path / "model"

    def test_two_checkpoints_on_tasks_and_a_group(
        self, checkpoint: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The other checkpoint has another tokenizer, but gets the same questions."""
        save(hybrid(), train_bpe(["another text entirely"] * 3, 270), tmp_path / "hybrid")
        workspace = tmp_path / "w"
        options = [
            "choices,both",
            "writing",
            "--model",
            checkpoint,
            "--include",
            folder,
            "--limit",
            "4",
        ]
        command = [
            "evaluate",
            "tasks",
            *map(str, options),
            "--against",
            str(tmp_path / "hybrid"),
            "-w",
            str(workspace),
        ]
        capsys.readouterr()
        main(command)
        shown = capsys.readouterr()
        assert "average of 3" in shown.out
        assert "it/s" not in shown.err
        rows = pd.read_csv(workspace / "reports" / "model" / "tasks.csv")
        assert list(rows.columns) == TASKS.header
        assert list(rows["task"]) == ["choices", "choices", "both", "writing", "average of 3"]
        assert rows["density"].between(0.05, 0.95).all()
        assert list(rows["against_density"]) == [0.5] * 5
        assert list(rows["num_samples"]) == [4, 4, 8, 4, 16]
        origin = yaml.safe_load((workspace / "reports" / "model" / "tasks.yaml").read_text())
        assert (origin["model"], origin["tau"], origin["limit"]) == (str(checkpoint), 0.4, 4)
        assert origin["against"]["model"] == str(tmp_path / "hybrid")
        main(command)
        assert "reused 4 of 4 tasks" in capsys.readouterr().err
        assert pd.read_csv(workspace / "reports" / "model" / "tasks.csv").equals(rows)

    @pytest.mark.slow
    def test_shipped_tasks_end_to_end(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The embedded reference answers them offline, with default options."""
        main(
            [
                "evaluate",
                "tasks",
                "stdlib_completions,stdlib_names",
                "--limit",
                "3",
                "-w",
                str(tmp_path),
            ]
        )
        rows = pd.read_csv(tmp_path / "reports" / "stdlib-21x3" / "tasks.csv")
        assert list(rows["metric"]) == ["acc", "exact_match", "first metric of each"]
        assert rows["density"].between(0.2, 0.4).all()
        kept = sorted((tmp_path / "runs" / "stdlib-21x3" / "tasks").iterdir())
        assert [len(file.read_text().splitlines()) for file in kept] == [4, 4]
        assert "stdlib_names" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["stdlib_completion"], "similar names: stdlib_completions"),
            (["choices", "--include", "gone"], "folder of tasks not found: gone"),
            (["choices", "--context", "64"], "No such option: --context"),
            (["choices", "--samples", "3"], "No such option: --samples"),
            (["--limit", "5"], "Missing argument 'TASK'"),
            (["choices", "--tau", "2"], "--tau must lie in [0, 1]"),
            (["code"], "code: these tasks execute code that the model generates"),
            (["long"], "long generates up to 500 tokens, but the model's context of 128 tokens"),
        ],
    )
    def test_invalid_options(
        self,
        options: list[str],
        message: str,
        checkpoint: Path,
        folder: Path,
        tmp_path: Path,
        text: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (folder / "code.yaml").write_text("task: code\nunsafe_code: true\n")
        long = WRITING.replace("task: writing", "task: long").replace(
            "max_gen_toks: 9", "max_gen_toks: 500"
        )
        (folder / "long.yaml").write_text(long.replace("FOLDER", str(folder)))
        include = [] if "--include" in options else ["--include", folder]
        assert message in fails(
            capsys,
            "evaluate",
            "tasks",
            *options,
            "--model",
            checkpoint,
            *include,
            "-w",
            tmp_path / "w",
        )

    def test_the_papers_tasks_are_listed_with_missing_data(self) -> None:
        """All sixteen, or the fourteen that run no code."""
        messages = MessageLog()
        reporter = replace(messages.reporter, cautioned=messages.announced.append)
        with pytest.raises(UserError, match="no data for 14 of 14 tasks") as error:
            run(TasksOptions(names=["paper"]), reporter)
        assert len(str(error.value).splitlines()) == 3
        assert "hellaswag (Rowan/hellaswag)" in str(error.value)
        assert "hf download --repo-type dataset" in str(error.value)
        assert (
            "left out humaneval_plus, mbpp: they execute code that the model generates (--allow-code)"
            in messages.announced
        )
