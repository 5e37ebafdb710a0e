"""Test that the documents that selected a layout are known, whatever became of the record that measured them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from helpers import tiny_model
from marks import slow_after
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.workspace import Workspace
from spkv_nas.contrib.search.options import SearchOptions
from spkv_nas.contrib.search.recipe_evaluator import RecipeEvaluator
from spkv_nas.contrib.search.stage import run
from spkv_nas.model.checkpoint import save
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.options.score import ScoreOptions
from spkv_nas.stages.options.verdict import VerdictOptions
from spkv_nas.stages.probe import probe
from spkv_nas.stages.propose import propose
from spkv_nas.stages.score import run as score
from spkv_nas.stages.verdict import VerdictResult, document
from spkv_nas.stages.verdict import run as verdict
from spkv_nas.training.recipe import Recipe

# Documents of each folder
TEXTS = {
    "a": range(12),
    "b": range(8, 20),
    "c": range(18, 30),
    "d": range(30, 42),
}


@pytest.fixture(scope="module")
def model_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> Path:
    """Write a dense model and texts that share documents."""
    folder = tmp_path_factory.mktemp("selection")
    save(tiny_model(vocab_size=300), tiny_tokenizer, folder / "dense")
    for name, numbers in TEXTS.items():
        (folder / name).mkdir()
        for number in numbers:
            words = " ".join(f"word{(number * word) % 17} returns" for word in range(8))
            (folder / name / f"{number}.txt").write_text(f"document {number}: {words}\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("dense", *TEXTS):
        Path(name).symlink_to(model_folder / name)
    return tmp_path


def measure(text: str, **options: object) -> str:
    """Probe on a text, and return the name of the probe."""
    return probe(
        ProbeOptions(model="dense", data=[text], context="32", signal="attention-mass", **options)
    ).name  # type: ignore[arg-type]


def judge(*layouts: Path, data: list[str], **options: object) -> VerdictResult:
    files = [str(layout) for layout in layouts]
    common = {"model": "dense", "context": "32", "margin": "nll=50%"}
    return verdict(VerdictOptions(candidates=files, data=data, **common | options)).value  # type: ignore[arg-type]


def left_out(*layouts: Path, data: list[str]) -> int | None:
    """Return how many documents a verdict leaves out; None if all, so that it refuses."""
    try:
        result = judge(*layouts, data=data)
    except UserError as error:
        return None if "give held-out text" in str(error) else pytest.fail(str(error))
    claim = document(result)["sentences"][-1]
    assert ("on other text" in claim) == (
        not result.compared.num_left_out and not result.compared.selected.unknown
    )
    return result.compared.num_left_out


class TestReplacedRecords:
    """Records of a name that is measured again are kept."""

    def test_a_probe_of_another_text(self, folder: Path) -> None:
        layout = Path("layouts/dense-attention-mass/densest.yaml")
        assert measure("a") == "dense-attention-mass"
        propose(ProposeOptions(budget="3"))
        assert left_out(layout, data=["a"]) is None
        assert measure("c") == "dense-attention-mass-2"
        assert measure("c") == "dense-attention-mass-2"
        assert measure("a") == "dense-attention-mass"
        assert left_out(layout, data=["a"]) is None
        assert left_out(layout, data=["b"]) == 4
        assert left_out(layout, data=["d"]) == 0

    def test_a_verdict_has_the_name_of_the_probe(self, folder: Path) -> None:
        """Samples are shared by all names."""
        name = measure("a")
        layout = propose(ProposeOptions(budget="3")).folder / "densest.yaml"
        assert judge(layout, data=["d"]).folder == Path("reports", name)
        kept = sorted(Path("runs/dense/verdict").rglob("*.npz"))
        assert judge(layout, data=["d"], name="other").folder == Path("reports", "other")
        assert sorted(Path("runs").rglob("verdict/**/*.npz")) == kept

    @pytest.mark.parametrize("change", slow_after(1, ["copy", "rename", "delete"]))
    def test_a_probe_that_is_gone(self, folder: Path, change: str) -> None:
        name = measure("a")
        propose(ProposeOptions(budget="3"))
        table, layout = Path("probes", name), Path("layouts", name, "densest.yaml")
        if change == "rename":
            table.rename("probes/renamed")
        elif change == "delete":
            shutil.rmtree("probes")
        else:
            shutil.copytree(table, "elsewhere/probes/copied")
            layout = propose(
                ProposeOptions(budget="3", probe="copied", workspace=Path("elsewhere"))
            ).folder
            shutil.rmtree("elsewhere/probes")
            layout /= "densest.yaml"
        assert left_out(layout, data=["a"]) is None

    def test_scores_on_another_text(self, folder: Path) -> None:
        name = measure("a")
        layout = propose(ProposeOptions(budget="3", num_random=0)).folder / "densest.yaml"
        for text in ("c", "d"):
            score(ScoreOptions(model="dense", data=[text], context="32", probe=name))
        assert left_out(layout, data=["c"]) is None
        assert left_out(layout, data=["d"]) is None
        assert left_out(layout, data=["b", "c"]) == 4 + 12

    def test_only_documents_that_were_measured_are_used_up(self, folder: Path) -> None:
        Layout(("GL",) * 4, window=4, strategy="mine").write("mine.yaml")
        options = {"layouts": [Path("mine.yaml")], "model": "dense", "data": ["d"], "context": "32"}
        result = score(ScoreOptions(**options, max_tokens=96)).value
        assert 0 < result.num_documents < len(TEXTS["d"])
        assert left_out(Path("mine.yaml"), data=["d"]) == result.num_documents

    def test_layouts_with_sink_tokens(self, folder: Path) -> None:
        """Their record has the numbers by layout."""
        Layout(("GL",) * 4, window=4, strategy="mine", sinks=1).write("mine.yaml")
        score(ScoreOptions(layouts=[Path("mine.yaml")], model="dense", data=["c"], context="32"))
        assert left_out(Path("mine.yaml"), data=["c"]) is None

    def test_a_damaged_record_does_not_cost_a_new_result(self, folder: Path) -> None:
        Layout(("GL",) * 4, window=4, strategy="mine").write("mine.yaml")
        record = Path("reports/dense/zero-shot.yaml")
        record.parent.mkdir(parents=True)
        for damaged in ("num_tokens: many\n", "a: [\n"):
            record.write_text(damaged)
            score(
                ScoreOptions(layouts=[Path("mine.yaml")], model="dense", data=["c"], context="32")
            )
            assert "inputs" in record.read_text()
            assert damaged in [file.read_text() for file in record.parent.glob("zero-shot-*.yaml")]

    def test_scores_of_the_same_text_are_gathered(self, folder: Path) -> None:
        """Layouts that were scored earlier stay in the table."""
        name = measure("a")
        for budget in ("3", "5"):
            propose(ProposeOptions(budget=budget, num_random=0))
            score(ScoreOptions(model="dense", data=["c"], context="32", probe=name))
        rows = Path("reports", name, "zero-shot.csv").read_text().splitlines()
        numbers = {row.split(",")[2] for row in rows if row.startswith("densest")}
        assert numbers == {"3", "5"}
        assert len(list(Path("reports", name).glob("zero-shot*.csv"))) == 1


class History:
    """A random sequence of commands, with a list kept by hand of the documents that each layout was selected on."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.of_probe: dict[str, set[int]] = {}
        self.of_layout: dict[str, set[int]] = {}  # by content
        self.files: list[Path] = []

    def run(self, steps: int) -> Iterator[str]:
        self.probe()
        self.propose()
        for _ in range(steps):
            command = self.random.choice(
                ("probe", "propose", "score", "search", "mischief", "check", "check")
            )
            getattr(self, command)()
            yield command
        self.check()

    def probe(self) -> None:
        text = self.random.choice([*TEXTS])
        named = {"name": "mine"} if self.random.random() < 0.3 else {}
        self.of_probe[measure(text, window=self.random.choice((4, 6)), **named)] = set(TEXTS[text])

    def propose(self) -> None:
        name = self.random.choice(Workspace(Path()).probes() or [""])
        if not name:
            return
        folder = propose(ProposeOptions(budget=str(self.random.randint(2, 6)), probe=name)).folder
        for file in folder.glob("*.yaml"):
            self.of_layout.setdefault(Layout.read(file).content, set()).update(self.of_probe[name])
        self.files = sorted(Path("layouts").rglob("*.yaml"))

    def score(self) -> None:
        files = self.random.sample(self.files, min(3, len(self.files)))
        text = self.random.choice([*TEXTS])
        score(ScoreOptions(layouts=files, model="dense", data=[text], context="32"))
        for file in files:
            self.of_layout[Layout.read(file).content].update(TEXTS[text])

    def search(self) -> None:
        """Search without training; the documents are those of an evaluator that is made anew."""
        names = [name for name in Workspace(Path()).probes() if name in self.of_probe]
        text = self.random.choice([*TEXTS])
        recipe = Path(f"search-{text}.yaml")
        data = f"{{sources: [{text}], block_size: 32, heldout: 0.8}}"
        recipe.write_text(
            f"name: s{text}\nmodel: {{path: dense}}\ndata: {data}\nbranch: {{steps: 2}}\ngates: {{window: 4}}\n"
        )
        probe = self.random.choice(names)
        name = f"s{text}-{probe}"
        effort = {"budget": "3", "trials": 2, "retrain": 0, "max_tokens": 4096}
        folder = run(SearchOptions(recipe=recipe, probe=probe, name=name, **effort)).value.folder  # type: ignore[arg-type]
        evaluator = RecipeEvaluator(
            Recipe.read(recipe), Path(), Path("runs", f"s{text}"), max_tokens=4096
        )
        numbers = {int(Path(info.name).stem) for info in evaluator._chosen_on.present}
        window = HeadScores.read(Path("probes", probe)).window
        assert window is not None
        for heads in pd.read_csv(folder / "search.csv")["heads"]:
            self.of_layout.setdefault(Layout(tuple(heads.split()), window).content, set()).update(
                numbers
            )
        for file in Path("layouts", name, "search").glob("*.yaml"):
            self.of_layout[Layout.read(file).content].update(self.of_probe[probe])
        self.files = sorted(Path("layouts").rglob("*.yaml"))

    def mischief(self) -> None:
        """Rename or delete a probe."""
        names = Workspace(Path()).probes()
        if len(names) > 1:
            name = self.random.choice(names)
            if self.random.random() < 0.5:
                shutil.rmtree(Path("probes", name))
            else:
                Path("probes", name).rename(Path("probes", f"{name}x"))
                self.of_probe[f"{name}x"] = self.of_probe[name]

    def check(self) -> None:
        """Compare what a verdict leaves out with the list."""
        file = self.random.choice(self.files)
        texts = self.random.sample([*TEXTS], self.random.randint(1, 2))
        documents = {number for text in texts for number in TEXTS[text]}
        expected = documents & self.of_layout[Layout.read(file).content]
        assert left_out(file, data=texts) == (None if expected == documents else len(expected))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:layouts with")
@pytest.mark.parametrize("seed", range(50))
def test_random_sequences(folder: Path, seed: int) -> None:
    """No document that selected a layout is used for its verdict, and none is left out for another reason."""
    assert len(list(History(seed).run(8))) == 8
