"""Test plans: what would be trained, by the recipe, by finished runs, and by timed steps; and first recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import fails, make_table, tiny_model, write_project
from marks import pairwise
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.shape import HeadShape, ModelSize
from spkv_nas.base.errors import UserError
from spkv_nas.base.manifest import write_manifest
from spkv_nas.base.progress import SILENT
from spkv_nas.base.units import format_seconds
from spkv_nas.cli import main
from spkv_nas.cost.stage_costs import Site, Stages, Training
from spkv_nas.model.checkpoint import read_size, save
from spkv_nas.model.model_shape import model_size
from spkv_nas.stages.dry_run import plan_of
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.train import TrainOptions
from spkv_nas.stages.options.train_hybrid import TrainHybridOptions
from spkv_nas.stages.train import run as train
from spkv_nas.training.first_recipe import Draft, TextSize, finished_model_rate
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.run_files import newest_step
from spkv_nas.training.run_plan import FINISHED, Planner
from spkv_nas.training.step_cost import StepCost, estimate, how_trained, measure
from spkv_nas.training.variants import Kind, Variant

FLOAT32 = Training(1, 1, bfloat16=False)
RUN = 8 * 4 * 32  # tokens of a branch of the tiny recipe
HELDOUT = 1600  # tokens of its held-out text


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the timing of steps, which does not matter here."""
    monkeypatch.setattr("spkv_nas.training.step_cost._ROUNDS", 1)


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


class TestStepCost:
    def test_memory_is_that_of_the_parameters_and_of_every_block(self, recipe_file: Path) -> None:
        """Weights, gradients and moments take 16 bytes per parameter; the formulas are those of ``plan``."""
        recipe = Recipe.read(recipe_file)
        planner = Planner(recipe, recipe_file.parent, recipe_file.parent / "runs", device="cpu")
        fixed, one, two = (planner.memory(Kind.FULL_ATTENTION, blocks) for blocks in (0, 1, 2))
        assert fixed == 16 * planner.size.num_parameters
        # Bytes of one activation as wide as the model
        hidden = 4 * recipe.data.block_size * planner.size.hidden_size
        assert two - one == one - fixed > planner.size.heads.num_layers * 10 * hidden
        assert planner.memory(Kind.SP_KV, 1) > one
        stages = Stages(
            planner.size, recipe.gates, Site("", 1e9, is_cpu=True), recipe.data.block_size, 8
        )
        phase = how_trained(recipe, recipe.branch, planner.size, bfloat16=False)
        planned = stages.train("", replace(phase, micro_batch_size=2), gated=False).memory
        assert planned.total == two

    def test_a_step_is_its_passes_and_an_update(self) -> None:
        assert StepCost(2.0, 1.0, 3.0, True).seconds(4) == 11.0

    def test_an_estimate_counts_flops(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "spkv_nas.training.step_cost.matmul_speed", lambda device, bfloat16: 1e9
        )
        stages = Stages(model_size(tiny_model()), GateConfig(), Site("cpu", 1e12), 24, 1)
        guess = estimate(stages, Training(1, 8, bfloat16=False), gated=False)
        assert guess.forward_seconds == pytest.approx(stages.measure("", 24).flops / 0.5e9)
        assert guess.pass_seconds == pytest.approx(3 * guess.forward_seconds)
        assert not guess.is_measured
        assert measure(tiny_model(), (1, 24), FLOAT32, device="cpu").is_measured


class TestModelSize:
    @pytest.mark.parametrize("tied", [True, False])
    def test_parameters(self, tied: bool, tmp_path: Path, tiny_tokenizer: object) -> None:
        model = tiny_model(tie_word_embeddings=tied)
        save(model, tiny_tokenizer, tmp_path)  # type: ignore[arg-type]
        size = read_size(tmp_path)
        assert size.num_parameters == sum(parameter.numel() for parameter in model.parameters())
        assert size.num_multiplied == size.num_parameters - (0 if tied else 97 * 32)
        assert (
            size.without_embeddings
            == sum(parameter.numel() for parameter in model.model.layers.parameters()) + 32
        )
        assert (size.heads.grid, size.hidden_size, size.positions) == ((4, 2), 32, 128)


class TestDryRun:
    @pytest.mark.slow
    def test_training(
        self, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The plan writes nothing, and then finds what was trained."""
        workspace, before = tmp_path / "w", everything(tmp_path)
        main(["train", str(recipe_file), "--workspace", str(workspace), "--dry-run"])
        printed = capsys.readouterr().out
        assert everything(tmp_path) == before
        for words in (
            f"total: {6 * 4 * 32 + RUN:,} tokens",
            "held out; 40 documents",
            "memory: about",
            "a step",
        ):
            assert words in printed
        options = TrainOptions(recipe=recipe_file, workspace=workspace)
        dense, branch = plan_of(options).runs
        assert (dense.name, dense.steps, dense.tokens, dense.state) == ("dense", 6, 6 * 4 * 32, "")
        assert (branch.name, branch.steps, branch.tokens, branch.state) == ("sp-kv", 8, RUN, "")
        assert branch.seconds > 0
        train(options, SILENT)
        before = everything(tmp_path)
        main(["train", str(recipe_file), "--workspace", str(workspace), "--dry-run"])
        assert "total: nothing left to do" in capsys.readouterr().out
        *trained, probe = plan_of(ProbeOptions(recipe=recipe_file, workspace=workspace)).runs
        assert [run.state for run in trained] == [FINISHED, FINISHED]
        assert (probe.name, probe.steps) == ("probe", 0)
        self.hybrids(recipe_file, workspace)
        assert everything(workspace / "runs") == {
            path for path in before if workspace / "runs" in path.parents
        }

    def hybrids(self, recipe_file: Path, workspace: Path) -> None:
        make_table([[0.9, 0.1], [0.2, 0.3]]).write(workspace / "probes" / "tiny")
        for name, row in (("a", "GL"), ("b", "LG"), ("twin", "GL")):
            Layout((row, "LL"), 8, name).write(workspace / "layouts" / "p" / f"{name}.yaml")
        options = TrainHybridOptions(recipe=recipe_file, probe="tiny", seeds=2, workspace=workspace)
        plan = plan_of(options)
        left = {run.name: run.tokens for run in plan.runs}
        assert [name for name in left if "twin" in name] == []
        assert left["sp-kv, seed 0"] == 0
        assert left["sp-kv, seed 1"] == left["full-attention, seed 0"] == left["b, seed 1"] == RUN
        assert plan.fits

    def test_of_a_run_that_was_interrupted(self, tmp_path: Path) -> None:
        for step in (3, 6, 9):
            (tmp_path / f"checkpoint-{step}").mkdir()
            if step < 9:
                write_manifest(tmp_path / f"checkpoint-{step}")
        assert newest_step(tmp_path) == 6
        assert newest_step(tmp_path / "nothing") == 0

    @pytest.mark.slow
    def test_of_the_other_commands(
        self, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        workspace = tmp_path / "w"
        make_table([[0.9, 0.1], [0.2, 0.3]]).write(workspace / "probes" / "p")
        rows = (
            "{SP-KV: {}, longer: {branch: {steps: 20}}, full attention: {variant: full-attention}, "
            "as it is: {variant: full-attention, trained: false}}"
        )
        ablations = recipe_file.with_name("ablations.yaml")
        ablations.write_text(f"name: mine\nrecipe: {recipe_file.name}\nrows: {rows}\n")
        before = everything(tmp_path)
        effort = ("--retrain", "2", "--budget", "1")
        outputs = {
            ("reproduce", "ablate", ablations): (
                f"total: {6 * 4 * 32 + 2 * RUN + 20 * 4 * 32 + HELDOUT:,} tokens",
                "longer",
                "full atten",
            ),
            ("search", "--probe", "p", "--recipe", recipe_file, *effort): (
                "short, layouts (at most), 3",
                "full, layouts (at most), 3",
                "scores (at most)",
            ),
        }
        for command, words in outputs.items():
            main([*map(str, command), "--workspace", str(workspace), "--dry-run"])
            printed = capsys.readouterr().out
            assert all(word in printed for word in words), printed
        assert everything(tmp_path) == before

    def test_too_little_text_and_memory_are_reported(
        self, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("spkv_nas.base.memory.available_bytes", lambda device: 1 << 17)
        recipe = Recipe.read(recipe_file)
        small = TextSize(documents=2, tokens=100)
        planner = Planner(recipe, recipe_file.parent, recipe_file.parent / "runs", text=small)
        plan = planner.plan([planner.branch("sp-kv", Variant.sp_kv())])
        assert not plan.fits
        remarks = "\n".join(plan.remarks)
        assert "less than one batch of 128 tokens" in remarks
        assert (
            "128.00 KiB are free; a smaller micro_batch_size or data.block_size takes less"
            in remarks
        )
        assert "estimated by FLOPs" in remarks


def test_times_as_text() -> None:
    texts = {
        0: "0 s",
        0.2: "1 s",
        89: "89 s",
        90: "2 min",
        3599: "1 h 0 min",
        12000: "3 h 20 min",
        4e5: "5 days",
    }
    assert {seconds: format_seconds(seconds) for seconds in texts} == texts


def size_of(layers: int, width: int, positions: int | None = 4096) -> ModelSize:
    """Return the size of a model of ``layers`` layers, 12 width^2 parameters each, and 32,000 tokens."""
    heads = HeadShape(layers, max(1, width // 64), max(1, width // 256), 64)
    body = 12 * layers * width**2
    return ModelSize(
        heads, body + 64000 * width, body, width, 4 * width, 32000, positions, num_full=layers
    )


class TestFirstRecipe:
    @pytest.mark.parametrize(
        ("shape", "place", "tokens", "steps"),
        pairwise(
            [(2, 64), (21, 96), (24, 1024), (32, 4096)],  # layers, width
            [("cpu", 128), ("cuda", None), ("cpu", 131072)],  # device, positions of the model
            [3000, 150_000, 10**9],
            [20, 3000],
        ),
    )
    def test_is_a_recipe_without_a_warning(
        self,
        shape: tuple[int, int],
        place: tuple[str, int | None],
        tokens: int,
        steps: int,
        tmp_path: Path,
    ) -> None:
        device, positions = place
        size = size_of(*shape, positions)
        draft = Draft.of("mine", "a: 'model'", ("text #1",), size, TextSize(40, tokens), device)
        recipe = Draft(**{**vars(draft), "steps": steps, "micro_batch_size": 1}).recipe(tmp_path)
        assert recipe.warnings() == []
        assert (recipe.model.path, recipe.data.sources) == ("a: 'model'", ["text #1"])
        assert recipe.gates.window * 4 <= recipe.data.block_size <= (positions or 2048)
        assert 8 * recipe.branch.batch_size * recipe.data.block_size <= tokens
        assert recipe.data.heldout * tokens >= 8 * recipe.data.block_size
        assert recipe.gates.target_density == pytest.approx(2 / 7, abs=1e-3)

    def test_a_large_model_has_a_small_learning_rate(self, tmp_path: Path) -> None:
        """The paper trains 7 B at 5e-4, and the predictors at 5 times that."""
        draft = Draft.of("mine", "m", ("t",), size_of(32, 4096), TextSize(40, 10**8), "cuda")
        recipe = draft.recipe(tmp_path)
        assert recipe.branch.learning_rate == pytest.approx(5.3e-6, rel=0.1)
        assert recipe.branch.learning_rate * recipe.gates.learning_rate_multiplier == pytest.approx(
            2.5e-3, rel=0.2
        )
        assert (recipe.data.block_size, recipe.branch.batch_size, recipe.gates.window) == (
            2048,
            8,
            128,
        )

    def test_steps_of_few_tokens_have_a_smaller_learning_rate(self) -> None:
        """The rates of the embedded model, and of 30 M parameters, where 1.3e-4 at 2,048 tokens harms the model."""
        assert [finished_model_rate(2_133_024, tokens) for tokens in (2048, 16_384)] == [
            2.8e-4,
            2.8e-4,
        ]
        assert [finished_model_rate(25_965_056, tokens) for tokens in (2048, 32_768)] == [
            6.1e-5,
            1.3e-4,
        ]

    @pytest.mark.parametrize("steps", [20, 160, 1000])
    def test_a_finished_model_starts_with_warm_up(self, steps: int, tmp_path: Path) -> None:
        """A restart at a high rate without warm-up would harm the control."""
        draft = Draft.of("mine", "m", ("t",), size_of(21, 512, 96), TextSize(40, 10**7), "cpu")
        branch = replace(draft, steps=steps).recipe(tmp_path).branch
        assert branch.learning_rate <= 3e-4
        assert branch.warmup_steps == steps / 10
        assert branch.distill is not None
        assert branch.distill.weight == 0.5

    @pytest.mark.parametrize("tokens", [0, 2000])
    def test_too_little_text(self, tokens: int) -> None:
        with pytest.raises(UserError, match="too few for 64 blocks of 32 tokens"):
            Draft.of("mine", "m", ("t",), size_of(2, 64), TextSize(40, tokens), "cpu")

    @pytest.mark.parametrize("name", ["2024", "yes", "1e3", "null", "2024-11-05"])
    def test_a_name_that_yaml_reads_as_another_type(self, name: str) -> None:
        draft = Draft.of(name, "m", ("t",), size_of(2, 64), TextSize(40, 200_000), "cpu")
        assert draft.recipe(Path()).name == name


class TestInit:
    @pytest.fixture
    def model(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
        save(tiny_model(vocab_size=len(tiny_tokenizer)), tiny_tokenizer, tmp_path / "my model")
        return tmp_path / "my model"

    @pytest.fixture
    def corpus_folder(self, tmp_path: Path) -> Path:
        return write_project(tmp_path / "project").parent / "text"

    @pytest.fixture
    def fixed_cost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cost = StepCost(
            pass_seconds=2.0,
            forward_seconds=0.0,
            update_seconds=0.0,
            is_measured=True,
        )
        monkeypatch.setattr(Planner, "_cost", lambda planner, variant: cost)
        monkeypatch.setattr(Planner, "memory", lambda planner, kind, blocks: 1000 + 100 * blocks)

    @pytest.mark.slow
    def test_estimates_the_path_and_writes_only_the_recipe(
        self, model: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before, file = everything(tmp_path), tmp_path / "mine" / "recipe.yaml"
        command = [
            "init",
            str(model),
            str(corpus_folder),
            "--out",
            str(file),
            "--workspace",
            str(tmp_path / "w"),
        ]
        main(command)
        assert everything(tmp_path) - before == {file.parent, file}
        recipe = Recipe.read(file)
        assert (recipe.name, recipe.model.path) == ("my-model", str(model))
        run = recipe.branch.steps * recipe.branch.batch_size * recipe.data.block_size
        printed = capsys.readouterr().out
        for words in (
            f"{7 * run:,}",
            "layouts, 7",
            "zero-shot scores",
            "total: ",
            "memory: about",
            "held out; 40",
        ):
            assert words in printed
        assert "already exists: give another --out, or --force" in fails(capsys, *command)
        assert Recipe.read(file) == recipe
        main([*command, "--force", "--steps", "50", "--name", "other"])
        assert (Recipe.read(file).name, Recipe.read(file).branch.steps) == ("other", 50)

    @pytest.mark.usefixtures("fixed_cost")
    def test_minutes_decide_the_steps(
        self, model: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "recipe.yaml"
        command = ["init", str(model), str(corpus_folder), "--out", str(file), "--minutes"]
        main([*command, "600"])
        recipe = Recipe.read(file)
        assert recipe.branch.steps == 36000 // (9 * 2 * recipe.branch.batch_size)  # nine runs
        assert recipe.micro_batch_size is None
        needed = fails(capsys, *command, "1", "--force")
        assert "20 steps of every run, the minimum, take" in needed
        assert "allow more minutes" in needed
        assert "not both" in fails(capsys, *command, "1", "--force", "--steps", "3")

    @pytest.mark.usefixtures("fixed_cost")
    def test_an_embedded_model_does_not_change_results_of_the_demo(
        self, corpus_folder: Path, tmp_path: Path
    ) -> None:
        main(["init", "embedded:dense", str(corpus_folder), "--out", str(tmp_path / "recipe.yaml")])
        recipe = Recipe.read(tmp_path / "recipe.yaml")
        assert (recipe.name, recipe.model.path) == ("embedded-dense", "embedded:dense")

    @pytest.mark.usefixtures("fixed_cost")
    @pytest.mark.parametrize(("available", "micro"), [(10**6, None), (1600, 2), (1400, 1), (10, 1)])
    def test_passes_fit_the_memory(
        self,
        available: int,
        micro: int | None,
        model: Path,
        corpus_folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr("spkv_nas.base.memory.available_bytes", lambda device: available)
        file = tmp_path / "recipe.yaml"
        main(["init", str(model), str(corpus_folder), "--out", str(file)])
        assert Recipe.read(file).micro_batch_size == micro
        assert ("the planned work does not fit in memory" in capsys.readouterr().err) == (
            available == 10
        )

    @pytest.mark.parametrize(
        ("available", "expected"),
        [(10**6, (False, None)), (1800, (False, 1)), (1400, (True, 2)), (1260, (True, 1))],
    )
    def test_layers_are_computed_again_where_no_block_fits_otherwise(
        self,
        available: int,
        expected: object,
        model: Path,
        corpus_folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def memory(planner: Planner, kind: Kind, blocks: int) -> int:
            return 900 + blocks * (100 if planner.recipe.gradient_checkpointing else 300)

        monkeypatch.setattr(
            Planner, "_cost", lambda planner, variant: StepCost(2.0, 0.0, 0.0, True)
        )
        monkeypatch.setattr(Planner, "memory", memory)
        monkeypatch.setattr("spkv_nas.base.memory.available_bytes", lambda device: available)
        file = tmp_path / "recipe.yaml"
        main(["init", str(model), str(corpus_folder), "--out", str(file)])
        recipe = Recipe.read(file)
        assert recipe.data.block_size == 128  # as with memory
        assert (recipe.gradient_checkpointing, recipe.micro_batch_size) == expected

    @pytest.mark.slow
    def test_the_path_of_the_readme(
        self,
        corpus_folder: Path,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Its recipe passes the checks, and ``match-budget`` works on what it trained."""
        monkeypatch.setattr("spkv_nas.training.first_recipe.STEP_TOKENS", {"cpu": 256})
        monkeypatch.chdir(tmp_path)
        save(
            tiny_model("gemma3_text", vocab_size=len(tiny_tokenizer)), tiny_tokenizer, Path("model")
        )
        main(["init", "model", str(corpus_folder), "--name", "mine", "--steps", "6"])
        main(["probe", "recipe.yaml"])
        main(["propose", "--tau", "match-budget", "--num-random", "0"])
        main(["train-hybrid", "--recipe", "recipe.yaml"])
        assert Path("reports/mine/comparison.csv").is_file()
        warnings = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")
        ]
        # A random model's predictions make nothing better
        expected = (
            "so few documents",
            "more NLL retrained than before",
            "these numbers make no sense",
        )
        assert [line for line in warnings if not any(part in line for part in expected)] == []


def test_the_tokens_of_a_text_are_counted_as_blocks_have_them(
    recipe_file: Path, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spkv_nas.data.blocks import build_blocks
    from spkv_nas.data.sources import documents
    from spkv_nas.training import first_recipe

    sources = ["text"]
    whole = first_recipe.count_text(sources, recipe_file.parent, tiny_tokenizer)
    blocks = build_blocks(documents(sources, recipe_file.parent), tiny_tokenizer, 2)
    assert (whole.documents, whole.is_whole) == (40, True)
    separators = int((blocks.tokens == tiny_tokenizer.eos_token_id).sum())
    # Of text, but for the last block
    assert whole.tokens - 40 == pytest.approx(blocks.tokens.size - separators, abs=2)
    monkeypatch.setattr(first_recipe, "MAX_CHARACTERS", 10)
    part = first_recipe.count_text(sources, recipe_file.parent, tiny_tokenizer)
    assert not part.is_whole
