"""The training variants of the paper: each does what it says, and none does nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import RECIPE, logits, scatter_gates, tiny_model, weights
from pydantic import ValidationError
from spkv_kernels import attention
from torch import Tensor
from transformers import PreTrainedModel

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.attach import attach_gates
from spkv_nas.model.checkpoint import load, save
from spkv_nas.model.gates import gate_from_logits, predictors, regularised
from spkv_nas.model.modes import set_density_weight, set_gate_mode
from spkv_nas.model.windows import apply_layout
from spkv_nas.probing.density import probe
from spkv_nas.report.chart import Line
from spkv_nas.report.plot import save_chart
from spkv_nas.report.training_charts import density_evolution_chart
from spkv_nas.training import trainer
from spkv_nas.training.branches import Branch, train_branch
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.phases import GateSchedule
from spkv_nas.training.recipe import Recipe
from spkv_nas.training.variants import Variant


def gated(**options: Any) -> PreTrainedModel:
    model = tiny_model()
    attach_gates(model, GateConfig(window=6, hidden_size=16, **options), seed=0)
    return model


class TestSampled:
    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_the_gradient_is_that_of_its_definition(self, backend: str) -> None:
        """Paper, "Straight-through gradient estimator": g.detach() + log u - log u.detach(), in float64."""
        torch.manual_seed(0)
        q, k, v, weight = (torch.randn(2, 4, 40, 8, dtype=torch.float64) for _ in range(4))
        k, v = k[:, :2], v[:, :2]
        gate = torch.randn(2, 2, 40, dtype=torch.float64)
        grads = []
        for by_definition in (True, False):
            inputs = [x.clone().requires_grad_() for x in (q, k, v, gate)]
            torch.manual_seed(5)
            if by_definition:
                kept = gate_from_logits(inputs[3].detach(), "sampled", 0.5).log_utility
                assert kept is not None
                log_u = torch.nn.functional.logsigmoid(inputs[3])
                bias = torch.where(kept == 0, 0.0, -torch.inf) + log_u - log_u.detach()
                age = torch.arange(40)[:, None] - torch.arange(40)
                bias = torch.where(age < 6, 0.0, bias[:, :, None]).masked_fill(age < 0, -torch.inf)
                keys, values = (x.repeat_interleave(2, 1) for x in inputs[1:3])
                scores = inputs[0] @ keys.mT / 8**0.5 + bias.repeat_interleave(2, 1)
                out = scores.softmax(-1) @ values
            else:
                sampled = gate_from_logits(inputs[3], "sampled", 0.5)
                out = attention(*inputs[:3], window=6, log_utility=sampled.log_utility, backend=backend)
            (out * weight).sum().backward()
            grads.append([x.grad for x in inputs])
        for expected, found in zip(*grads, strict=True):
            assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
        assert grads[1][3].count_nonzero() > 20

    def test_probabilities_are_utilities_clipped(self) -> None:
        torch.manual_seed(0)
        far = torch.tensor([-20.0, -1.0, 0.5, 20.0, -torch.inf, torch.inf])
        sample = far.expand(1, 20_000, 6).transpose(1, 2)
        for p_min in (0.0, 0.1):
            bias = gate_from_logits(sample, "sampled", 0.5, p_min=p_min).log_utility
            assert bias is not None
            assert set(bias.unique().tolist()) == {0.0, -torch.inf}
            expected = torch.sigmoid(far).clamp(p_min, 1 - p_min)
            expected[4:] = torch.tensor([0.0, 1.0])  # heads without a gate are not sampled
            assert torch.allclose((bias == 0).double().mean((0, 2)).float(), expected, atol=0.015)

    def test_annealing_moves_probabilities_to_the_threshold(self) -> None:
        torch.manual_seed(0)
        sample = torch.tensor([-1.0, 1.0])[:, None].expand(1, 2, 20_000)
        gate = gate_from_logits(sample, "sampled", 0.5, anneal=0.75)
        assert gate.keep is not None
        u = torch.sigmoid(torch.tensor([-1.0, 1.0]))
        expected = 0.25 * u + 0.75 * torch.tensor([0.0, 1.0])
        assert torch.allclose(gate.keep.double().mean((0, 2)).float(), expected, atol=0.015)

    def test_a_seed_repeats_it_and_checkpointing_changes_nothing(self, tokens: Tensor) -> None:
        """What is computed again in the backward pass samples the same gates."""
        found = []
        for recompute in (False, True, False):
            model = gated(bias=0.0).train()
            scatter_gates(model)
            set_gate_mode(model, "sampled")
            if recompute:
                model.activation_checkpointing_enable()
            torch.manual_seed(7)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
        with torch.no_grad():
            again = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        assert again != found[0][0]  # another draw


class TestPredictor:
    def test_linear_has_one_layer(self) -> None:
        for module in predictors(gated(predictor="linear")).values():
            assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
                "down.weight": (2, 32),
                "down.bias": (2,),
            }

    def test_bidirectional_sees_both_sides(self) -> None:
        module = next(iter(predictors(gated(predictor="bidirectional", kernel_size=5)).values()))
        hidden = torch.randn(1, 20, 32)
        changed = hidden.clone()
        changed[:, 10] += 1.0
        moved = (module(hidden) != module(changed)).any(1)[0]
        assert moved.nonzero()[:, 0].tolist() == [8, 9, 10, 11, 12]

    def test_bidirectional_leaves_the_model_causal(self, tokens: Tensor) -> None:
        model = gated(predictor="bidirectional", kernel_size=11, bias=0.0)
        scatter_gates(model)
        set_gate_mode(model, "hard", 0.5)
        before = logits(model, tokens)
        tokens[:, 15:] = 3
        assert torch.equal(logits(model, tokens)[:, :15], before[:, :15])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kernel_size": 13}, "looks 6 tokens ahead, which must be less than the window of 6"),
            ({"kernel_size": 4}, "kernel_size must be odd"),
        ],
    )
    def test_look_ahead_past_the_window(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            GateConfig(window=6, predictor="bidirectional", **options)

    def test_initial_weights(self) -> None:
        one, three = (next(iter(predictors(gated(init_scale=scale)).values())) for scale in (1.0, 3.0))
        assert torch.allclose(three.down.weight, 3 * one.down.weight)
        assert torch.allclose(three.up.weight, 3 * one.up.weight)
        flat = next(iter(predictors(gated(init_scale=0.0, bias=2.5)).values()))
        assert (flat(torch.randn(1, 4, 32)) == 2.5).all()

    @pytest.mark.parametrize("options", [{"predictor": "linear"}, {"predictor": "bidirectional", "kernel_size": 5}])
    def test_round_trip(self, options: dict[str, Any], tokens: Tensor, tmp_path: Path, tiny_tokenizer: object) -> None:
        model = gated(sinks=2, **options)
        scatter_gates(model)
        save(model, tiny_tokenizer, tmp_path)  # type: ignore[arg-type]
        assert torch.equal(logits(load(tmp_path)[0], tokens), logits(model, tokens))


def test_sinks_are_always_kept(tokens: Tensor) -> None:
    q, k, v = (torch.randn(1, 2, 24, 8) for _ in range(3))
    module = next(iter(predictors(gated(sinks=3)).values()))
    found = module(torch.randn(1, 24, 32))
    keep = gate_from_logits(found, "hard", 1.0).keep
    assert keep is not None
    assert keep.nonzero()[:, 2].tolist() == [0, 1, 2] * 2
    far = attention(q, k, v, window=6, keep=keep)
    scores = q @ k.mT / 8**0.5
    age = torch.arange(24)[:, None] - torch.arange(24)
    visible = (age >= 0) & ((age < 6) | (torch.arange(24) < 3))
    assert torch.allclose(far, scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v, atol=1e-5)
    model = gated(sinks=3)
    set_gate_mode(model, "hard", 1.0)
    plain = gated()
    set_gate_mode(plain, "hard", 1.0)
    assert not torch.equal(logits(model, tokens), logits(plain, tokens))


class TestHeads:
    ROWS = ("SG", "LL", "GG", "SL")

    @pytest.fixture
    def model(self) -> PreTrainedModel:
        model = gated(heads=list(self.ROWS), bias=0.0)
        scatter_gates(model)
        return model

    @pytest.mark.parametrize(("mode", "tau", "letter"), [("hard", 1.0, "L"), ("open", 0.5, "G"), ("hard", 0.0, "G")])
    def test_closed_or_open_gates_are_a_layout(
        self, model: PreTrainedModel, mode: str, tau: float, letter: str, tokens: Tensor
    ) -> None:
        set_gate_mode(model, mode, tau)
        hybrid = tiny_model()
        apply_layout(hybrid, Layout(tuple(row.replace("S", letter) for row in self.ROWS), 6))
        assert torch.allclose(logits(model, tokens), logits(hybrid, tokens), atol=1e-5)

    @pytest.mark.parametrize("mode", ["soft", "sampled"])
    def test_only_gated_heads_learn(self, model: PreTrainedModel, mode: str, tokens: Tensor) -> None:
        set_gate_mode(model, mode)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        gradients = [module.down.weight.grad.abs().sum(1) for module in predictors(model).values()]
        assert [(g > 0).tolist() for g in gradients] == [[True, False], [True, False]]

    def test_a_probe_knows_the_others(self, model: PreTrainedModel) -> None:
        text = np.random.default_rng(0).integers(3, 97, size=(4, 24)).astype(np.int32)
        from spkv_nas.data.blocks import DocumentInfo

        blocks = TokenBlocks(text, np.zeros((4, 24), np.int32), (DocumentInfo("0", "all", "0"),))
        density = probe(model, blocks, 0.5).density
        fixed = np.array([[np.nan, 1], [0, 0], [1, 1], [np.nan, 0]])
        assert np.array_equal(density[~np.isnan(fixed)], fixed[~np.isnan(fixed)])
        assert ((density[np.isnan(fixed)] > 0) & (density[np.isnan(fixed)] < 1)).all()

    def test_round_trip(self, model: PreTrainedModel, tokens: Tensor, tmp_path: Path, tiny_tokenizer: object) -> None:
        set_gate_mode(model, "hard")
        save(model, tiny_tokenizer, tmp_path)  # type: ignore[arg-type]
        restored, _ = load(tmp_path)
        set_gate_mode(restored, "hard")
        assert torch.equal(logits(restored, tokens), logits(model, tokens))

    @pytest.mark.parametrize(
        ("rows", "message"),
        [(["SSS"] * 4, "is for 4 layers x 3 KV heads, the model has 4 layers x 2"), (["SS"], "is for 1 layers")],
    )
    def test_another_grid(self, rows: list[str], message: str) -> None:
        model = tiny_model()
        with pytest.raises(UserError, match=message):
            attach_gates(model, GateConfig(window=6, heads=rows))
        assert not predictors(model)
        assert model.config._attn_implementation == "sdpa"

    @pytest.mark.parametrize(("rows", "message"), [(["SX"], "letters S, G and L; found SX"), (["GL"], "no head has")])
    def test_other_letters(self, rows: list[str], message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            GateConfig(heads=rows)


class TestRegulariser:
    def test_its_gradient_is_that_of_the_loss(self) -> None:
        one = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
        two = one.detach().clone().requires_grad_()
        (regularised(one, 0.7) ** 2).sum().backward()
        ((two**2).sum() - 0.7 * torch.sigmoid(two).mean()).backward()
        assert torch.allclose(one.grad, two.grad)

    def test_a_model_adds_its_layers_up(self, tokens: Tensor) -> None:
        gradients = []
        for weight in (0.0, 2.0):
            model = gated(init_scale=0.0, bias=0.0)
            set_density_weight(model, weight)
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            gradients.append(torch.stack([m.down.bias.grad for m in predictors(model).values()]))
        # u = 1/2 everywhere: d(-2 mean u)/d bias of one head of the eight is -2 * 1/4 / 8
        assert torch.allclose(gradients[1] - gradients[0], torch.tensor(-2 / 4 / 8), atol=1e-6)


class TestSchedule:
    def test_sampled(self) -> None:
        schedule = GateSchedule(steps=8, soft_fraction=0.5, anneal_steps=1, mode="sampled")
        assert [(p.mode, p.anneal) for p in map(schedule.at, range(3, 6))] == [
            ("sampled", 0.0),
            ("sampled", 0.5),
            ("hard", 0.0),
        ]

    def test_from_scratch_is_hard_at_the_end_of_its_decay(self) -> None:
        schedule = GateSchedule(steps=100, soft_fraction=0.75, decay_steps=20)
        assert [schedule.at(s).mode for s in (0, 94, 95)] == ["soft", "soft", "hard"]


Train = Callable[..., Branch]


@pytest.fixture
def train(recipe: Recipe, corpus: Corpus, dense: Path, tmp_path: Path) -> Train:
    """Train an SP-KV branch of the test recipe with other gates."""

    def run(folder: str = "branch", top: dict[str, Any] | None = None, **gates: Any) -> Branch:
        data = recipe.model_dump()
        data["gates"] |= gates
        changed = Recipe(**{**data, **(top or {})})
        return train_branch(changed, corpus, dense, tmp_path / folder, Variant.sp_kv(), device="cpu")

    return run


class TestRuns:
    def test_frozen_model(self, train: Train, dense: Path) -> None:
        before, after = weights(dense), weights(train(training="frozen-model").checkpoint)
        assert all(torch.equal(before[name], after[name]) for name in before)
        other = weights(train("continued").checkpoint)
        assert not all(torch.equal(before[name], other[name]) for name in before)

    def test_from_scratch(self, train: Train, recipe: Recipe) -> None:
        assert recipe.dense is not None
        phase = recipe.dense.model_copy(update={"batch_size": recipe.branch.batch_size, "learning_rate": 2e-3})
        top = {"dense": phase.model_dump(), "branch": {**recipe.branch.model_dump(), "learning_rate": 2e-3}}
        branch = train(training="from-scratch", top=top)
        log = pd.read_csv(branch.checkpoint / "density-log.csv")
        assert log["step"].max() == 10  # one run of 6 + 8 steps, logged every 10
        top["branch"]["learning_rate"] = 1e-3
        with pytest.raises(ValidationError, match=r"dense\.learning_rate and branch\.learning_rate must be equal"):
            train("other", training="from-scratch", top=top)

    def test_the_regulariser_moves_density(self, train: Train) -> None:
        found = [
            train(f"weight{weight}", density_weight=weight, learning_rate_multiplier=20.0, bias=0.0).density
            for weight in (-50.0, 50.0)
        ]
        assert found[0] < 0.3 < 0.7 < found[1]

    def test_variants_differ(self, train: Train) -> None:
        """Each of them changes what is learned."""
        variants: list[dict[str, Any]] = [
            {},
            {"mode": "sampled"},
            {"mode": "sampled", "p_min": 0.2},
            {"predictor": "linear"},
            {"predictor": "bidirectional", "kernel_size": 5},
            {"sinks": 2},
            {"layers": [1]},
            {"heads": ["SL", "GS"]},
            {"weight_decay": 0.0},
            {"learning_rate_multiplier": 1.0},
            {"init_scale": 2.0},
            {"window": 4},
            {"anneal_steps": 2},
            {"tau": 0.7},
        ]
        nll = [train(str(i), **{"bias": 0.5, **gates}).nll.mean for i, gates in enumerate(variants)]
        assert len(set(nll)) == len(variants)

    def test_logs(self, train: Train, tmp_path: Path) -> None:
        branch = train(top={"evaluation": {"batch_size": 4, "every": 4, "max_tokens": 100}, "tensorboard": True})
        log = pd.read_csv(branch.checkpoint / "heldout-log.csv")
        assert log["step"].tolist() == [4, 8]
        assert (log["soft_nll"] != log["hard_nll"]).any()
        assert log["density"].between(0, 1).all()
        assert list(tmp_path.rglob("events.out.tfevents.*"))

    @pytest.mark.parametrize(
        ("gates", "at"),
        [
            ({"mode": "sampled"}, 5),
            ({"mode": "sampled", "anneal_steps": 2, "soft_fraction": 0.5}, 5),
            ({"anneal_steps": 2}, 7),
            ({"soft_fraction": 0.375}, 4),  # the first hard step follows a checkpoint
            ({"target_density": 0.3}, 5),
            ({"training": "frozen-model"}, 7),
        ],
    )
    def test_an_interrupted_run_resumes_bit_for_bit(
        self, gates: dict[str, Any], at: int, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = train("whole", **gates)

        def die(self: trainer.TokenProgressCallback, args: object, state: object, *_: object, **__: object) -> None:
            if state.global_step == at:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(trainer.TokenProgressCallback, "on_step_end", die)
            with pytest.raises(KeyboardInterrupt):
                train("torn", **gates)
        resumed = train("torn", **gates)
        before, after = weights(whole.checkpoint), weights(resumed.checkpoint)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert np.array_equal(whole.nll.total, resumed.nll.total)


def test_density_over_training_is_drawn_for_every_head(tmp_path: Path) -> None:
    steps, layers, heads = np.meshgrid([10, 20, 30], [0, 2], [0, 1, 2], indexing="ij")
    log = {"step": steps.ravel(), "layer": layers.ravel(), "kv_head": heads.ravel()}
    rows = pd.DataFrame(log).assign(density=np.random.default_rng(0).random(18))
    chart = density_evolution_chart(rows)
    lines = [mark.y for mark in chart.marks if isinstance(mark, Line)]
    assert len(lines) == 7  # six heads and their median
    for line, (_, head) in zip(lines, rows.groupby(["layer", "kv_head"]), strict=False):
        assert np.allclose(line, 100 * head["density"])
    assert np.allclose(lines[-1], 100 * rows.groupby("step")["density"].median())
    save_chart(tmp_path, chart)
    assert (tmp_path / "density-evolution.png").read_bytes().startswith(b"\x89PNG")


class TestRecipe:
    def read(self, tmp_path: Path, gates: str) -> Recipe:
        (tmp_path / "r.yaml").write_text(RECIPE[: RECIPE.index("gates:")] + gates)
        return Recipe.read(tmp_path / "r.yaml")

    def test_gates_of_a_layout(self, tmp_path: Path) -> None:
        Layout(("GL", "LL"), 9).write(tmp_path / "layout.yaml")
        gates = self.read(tmp_path, "gates: {layout: layout.yaml}\n").gates
        assert gates.of_model((2, 2)).heads == ["SL", "LL"]
        assert gates.window == 9

    def test_gates_of_some_layers(self, tmp_path: Path) -> None:
        gates = self.read(tmp_path, "gates: {layers: [1]}\n").gates
        assert gates.of_model((2, 2)).heads == ["GG", "SS"]
        with pytest.raises(UserError, match="there is no layer 2"):
            self.read(tmp_path, "gates: {layers: [2]}\n").gates.of_model((2, 2))

    @pytest.mark.parametrize(
        ("gates", "message"),
        [
            ("{layers: [0], heads: [SS, GG]}", "each says which heads have gates"),
            ("{p_min: 0.1}", "p_min belongs to mode: sampled"),
            ("{predictor: bidirectional, window: 8}", "looks 32 tokens ahead"),
            ("{target_density: 2}", "target_density"),
            ("{mode: hard}", "mode"),
        ],
    )
    def test_bad_gates(self, gates: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=message):
            self.read(tmp_path, f"gates: {gates}\n")
