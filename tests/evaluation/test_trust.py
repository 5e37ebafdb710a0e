"""Test how well a table ranks the gains of single heads, on tables and gains with a known answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import fails, gated, make_layouts, make_table, tiny_model
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.defaults import RECOMMENDED
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.head_tables import Gains
from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.probe_record import ProbeRecord
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import SHOWN
from spkv_nas.base.workspace import Workspace
from spkv_nas.cli import main
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.evaluation.ranking import MissedHead, Trust, spearman
from spkv_nas.model.checkpoint import save
from spkv_nas.probing.gains import add_one_head_gains
from spkv_nas.probing.signals import ADD_ONE_HEAD
from spkv_nas.proposal.coverage import coverage
from spkv_nas.proposal.strategies import densest
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.page import write_report
from spkv_nas.stages.next_steps import RECOMMENDATION, recommend
from spkv_nas.stages.options.probe import ProbeOptions
from spkv_nas.stages.options.propose import ProposeOptions
from spkv_nas.stages.probe import ABLATION_TOKENS
from spkv_nas.stages.propose import propose
from spkv_nas.stages.record import trust, unknown_trust

GAINS = np.array([[0.040, 0.001], [0.020, 0.0], [-0.001, 0.010], [0.030, 0.002]])
ERRORS = np.full((4, 2), 0.002)
# Densities that have nothing to do with the gains
LEFT = 0.6 + 0.1 * np.arange(8).reshape(4, 2) / 8


def gains(values: object = GAINS, errors: object = ERRORS) -> Gains:
    return Gains(np.asarray(values, dtype=float), np.asarray(errors, dtype=float))


def judge(
    values: np.ndarray, budget: int = 3, measured: Gains | None = None, documents: int | None = None
) -> Trust:
    return Trust.of(values, densest(values, budget), measured or gains(), documents)


class TestTrust:
    def test_a_table_that_orders_as_the_gains_do(self) -> None:
        result = judge(GAINS * 10)
        assert result.rho == pytest.approx(1.0)
        assert result.interval is None  # resamples of a perfect order are perfect
        assert result.left_out == pytest.approx(0.013 / 0.103)
        assert result.missed == (MissedHead(2, 1, 0.010, 0.002),)
        assert result.sentence() == (
            "the table's ranking of single-head gains has Spearman +1.00; "
            "its 3 heads exclude 13 ± 3 % of the gains, most in layer 2, head 1 (0.010 ± 0.002 nats)"
        )

    def test_a_table_that_misses_the_largest_gains(self) -> None:
        """The heads whose gains exceed their noise are named."""
        table = np.zeros((4, 2))
        table[[0, 2, 3], [1, 1, 1]] = 1.0
        actual = judge(table)
        expected = spearman(table.ravel(), GAINS.ravel())
        assert expected is not None
        assert (actual.rho, actual.interval) == expected
        left = 0.09 / 0.103
        assert actual.left_out == pytest.approx(left)
        assert actual.left_out_error == pytest.approx(
            0.002 / 0.103 * np.sqrt(3 * (1 - left) ** 2 + 3 * left**2)
        )
        assert [(head.layer, head.kv_head, head.gain) for head in actual.missed] == [
            (0, 0, 0.04),
            (3, 0, 0.03),
            (1, 0, 0.02),
        ]

    def test_noisy_gains_name_no_head(self) -> None:
        """The same choice with thirty times the noise."""
        result = judge(-GAINS, measured=gains(GAINS, 30 * ERRORS))
        assert np.isnan(result.left_out)
        assert result.missed == ()
        assert result.sentence().startswith("no single-head gain exceeds the noise")

    @pytest.mark.parametrize(
        ("documents", "are_few"), [(5, True), (7, True), (8, False), (None, False)]
    )
    def test_few_documents_name_no_head(self, documents: int | None, are_few: bool) -> None:
        """Five documents do not suffice to advise another signal."""
        result = judge(-GAINS, documents=documents)
        assert (result.missed == ()) == are_few
        assert result.sentence().endswith("measured on 5 documents, too few to rely on") == (
            documents == 5
        )
        assert ("most in layer 0, head 0" in result.sentence()) != are_few

    def test_missing_standard_errors(self) -> None:
        result = judge(-GAINS, measured=gains(GAINS, np.full((4, 2), np.nan)))
        assert (
            "exclude 99 % of the gains, most in layer 0, head 0 (0.040 nats)" in result.sentence()
        )


class TestFiles:
    def test_gains_are_stored_with_the_table(self, tmp_path: Path) -> None:
        table = replace(make_table(LEFT), gains=gains(GAINS, np.where(GAINS > 0.03, np.nan, 0.002)))
        table.write(tmp_path)
        read = HeadScores.read(tmp_path)
        assert read.gains is not None
        assert table.gains is not None
        assert np.array_equal(read.gains.values, GAINS)
        assert np.array_equal(read.gains.standard_error, table.gains.standard_error, equal_nan=True)
        assert read.content_hash == table.content_hash == make_table(LEFT).content_hash
        make_table(LEFT).write(tmp_path)
        assert HeadScores.read(tmp_path).gains is None

    def test_an_edit_is_noticed(self, tmp_path: Path) -> None:
        replace(make_table(LEFT), gains=gains()).write(tmp_path)
        file = tmp_path / "gains.csv"
        file.write_text(file.read_text().replace("0.04", "0.05"))
        with pytest.warns(UserWarning, match=r"gains\.csv: edited or damaged after it was written"):
            assert HeadScores.read(tmp_path).gains is not None

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            (["0,0,.1,"], "1 heads, but the table has 1 layers x 2 KV heads"),
            (["0,0,.1,", "0,0,.1,"], "line 3: expected each head of 1 layers x 2 KV heads once"),
            (["0,0,.1,", "1,0,.1,"], "line 3: expected each head"),
            (["0,0,nan,", "0,1,.1,"], "line 2: column 'gain' must be a number"),
            (["0,0,.1,-1", "0,1,.1,"], "column 'standard_error' must be a number in"),
        ],
    )
    def test_damaged_or_foreign(self, lines: Sequence[str], message: str, tmp_path: Path) -> None:
        make_table([[0.5, 0.2]]).write(tmp_path)
        (tmp_path / "gains.csv").write_text(
            "\n".join(["layer,kv_head,gain,standard_error", *lines]) + "\n"
        )
        with pytest.raises(UserError, match=message.replace("[", r"\[")):
            HeadScores.read(tmp_path)


def put(
    workspace: Workspace, name: str, values: object, measured: Gains | None = None, **metadata: Any
) -> HeadScores:
    """Write a probe to a workspace, by default of the model ``m``, and return it as read back."""
    table = replace(
        make_table(values),
        name=name,
        gains=measured,
        record=ProbeRecord.of({"model": "m", **metadata}),
    )
    table.write(workspace.probe_dir(name))
    return HeadScores.read(workspace.probe_dir(name))


class TestWorkspace:
    @pytest.fixture
    def workspace(self, tmp_path: Path) -> Workspace:
        return Workspace(tmp_path)

    def test_gains_of_the_signal_add_one_head_serve(self, workspace: Workspace) -> None:
        table = put(workspace, "mine", LEFT)
        chosen = densest(table.values, 3)
        assert trust(workspace, table, chosen) is None
        put(
            workspace,
            "elsewhere",
            GAINS,
            signal="add-one-head",
            kind="gain",
            unit="nats per token",
            model="other",
        )
        put(
            workspace,
            "layers",
            GAINS,
            signal="add-one-head",
            kind="gain",
            unit="nats per token",
            granularity="layer",
        )
        put(
            workspace, "small", GAINS[:2], signal="add-one-head", kind="gain", unit="nats per token"
        )
        put(
            workspace,
            "sinks",
            GAINS,
            signal="add-one-head",
            kind="gain",
            unit="nats per token",
            sinks=1,
        )
        assert trust(workspace, table, chosen) is None
        put(
            workspace,
            "mine-add-one-head",
            GAINS,
            signal="add-one-head",
            kind="gain",
            unit="nats per token",
        )
        result = trust(workspace, table, chosen)
        assert result is not None
        assert result.rho == Trust.of(table.values, chosen, gains()).rho
        better = put(workspace, "mine", LEFT, gains(GAINS[::-1]))
        assert trust(workspace, better, chosen) == trust_without_errors(better, chosen)

    def test_gains_recommend_nothing(self, workspace: Workspace) -> None:
        """The optimum of gains chosen and evaluated on the same tokens is no evidence for a signal."""
        put(workspace, "mine", LEFT, gains(), gains={"documents": 9})
        put(workspace, "mine-duo", GAINS.clip(0) * 20, signal="duo", kind="share")
        result = propose(ProposeOptions(probe="mine", budget="3", workspace=workspace.root))
        output = " ".join(
            [
                *result.sentences,
                *(f"{one.reason} {one.command}" for one in result.next),
                str(result.advice),
            ]
        )
        assert result.trust is not None
        assert result.trust.num_documents == 9
        assert "add-one-head " not in output
        assert "of largest gain" not in output
        assert "mine-duo" not in output
        assert [one.reason.startswith(RECOMMENDATION) for one in result.next] == [True]

    def test_propose_shows_the_recommended_signal_beside_densities(
        self, workspace: Workspace
    ) -> None:
        put(workspace, "mine", LEFT)
        put(workspace, "mine-duo", GAINS.clip(0) * 20, signal="duo", kind="share")
        options = ProposeOptions(workspace=workspace.root, probe="mine", budget="3", num_random=0)
        assert RECOMMENDED not in propose(options).answer.layouts
        gates = put(workspace, "mine-gates", GAINS.clip(0) * 20, signal=RECOMMENDED, kind="share")
        answer = propose(options).answer
        layout = Layout.read(workspace.layout_dir("mine") / f"{RECOMMENDED}.yaml")
        assert np.array_equal(layout.global_mask, densest(gates.values, 3))
        assert layout.provenance["probe"] == "mine-gates"
        assert answer.rows.set_index("strategy").loc[RECOMMENDED, "coverage"] == pytest.approx(
            coverage(answer.table, layout), abs=1e-4
        )
        shutil.rmtree(workspace.probe_dir("mine-gates"))
        propose(options)
        assert not (workspace.layout_dir("mine") / f"{RECOMMENDED}.yaml").exists()

    def test_a_damaged_neighbour_plays_no_part(self, workspace: Workspace) -> None:
        table = put(workspace, "mine", LEFT)
        put(workspace, "mine-duo", GAINS.clip(0), signal="duo", kind="share")
        (workspace.probe_dir("mine-duo") / "density.csv").write_text("layer\n")
        with pytest.warns(
            UserWarning, match="edited or damaged after|ignoring a probe that cannot be read"
        ):
            result = trust(workspace, table, densest(table.values, 3))
        assert result is None

    def test_a_probe_without_gains_says_so(self) -> None:
        table = make_table(LEFT)
        assert unknown_trust(table) is None
        assert "was not validated" in str(
            unknown_trust(replace(table, record=ProbeRecord.of({"model": "m"})))
        )
        assert (
            unknown_trust(
                replace(
                    table, record=ProbeRecord.of({"model": "m", "signal": "duo", "kind": "share"})
                )
            )
            is None
        )


def trust_without_errors(table: HeadScores, chosen: np.ndarray) -> Trust:
    assert table.gains is not None
    return Trust.of(table.values, chosen, table.gains)


def test_gains_of_a_table_are_those_of_the_signal() -> None:
    """One of the two domains has a single document, and so no standard error."""
    tokens = np.random.default_rng(0).integers(3, 290, size=(4, 40)).astype(np.int32)
    owner = np.repeat(np.arange(8, dtype=np.int32), 20).reshape(4, 40)
    blocks = TokenBlocks(
        tokens, owner, tuple(DocumentInfo(str(i), "ab"[i == 7], str(i)) for i in range(8))
    )
    model = tiny_model(vocab_size=300)
    result, took = add_one_head_gains(model, blocks, 6)
    assert result.values == pytest.approx(ADD_ONE_HEAD.measure(model, blocks, 6).values, abs=1e-6)
    assert took == {"passes": 6.0, "tokens": 160, "documents": 8}
    one = TokenBlocks(tokens, owner, tuple(DocumentInfo(str(i), "a", str(i)) for i in range(8)))
    assert result.standard_error == pytest.approx(
        ADD_ONE_HEAD.measure(model, one, 6).standard_error, abs=1e-9
    )


class TestCommand:
    @pytest.fixture
    def options(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> list[str]:
        save(gated(), tiny_tokenizer, tmp_path / "mine")
        (tmp_path / "text.txt").write_text(
            "".join(f"the fox {(7 * i) % 31} jumps over {i}. " for i in range(60))
        )
        options = ["--model", tmp_path / "mine", "--data", tmp_path / "text.txt", "--context", 64]
        return [*map(str, options), "--workspace", str(tmp_path / "w")]

    def test_probe_measures_and_propose_reports(
        self, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["probe", *options, "--ablation-tokens", "128"])
        table = HeadScores.read(tmp_path / "w" / "probes" / "mine")
        assert table.gains is not None
        assert table.record.entries()["gains"]["tokens"] == 128
        capsys.readouterr()
        main(["propose", "--workspace", str(tmp_path / "w"), "--budget", "3", "--json"])
        document = json.loads(capsys.readouterr().out)
        documents = table.record.gains.documents
        expected = Trust.of(table.values, densest(table.values, 3), table.gains, documents)
        assert document["trust"]["rho"] == expected.rho
        assert document["trust"]["budget"] == 3
        assert [head["gain"] for head in document["trust"]["missed"]] == [
            head.gain for head in expected.missed
        ]
        assert expected.sentence() in document["sentences"]

    def test_the_recommended_signal_is_named(self, tmp_path: Path) -> None:
        """The recommendation replaces probed densities; other signals stay."""
        table, workspace = make_table([[0.5, 0.4]]), Workspace(tmp_path)
        embedded = {
            "model": "embedded:reference",
            "data": {"sources": ["stdlib"]},
            "options": {"signal": "density"},
        }
        advice = recommend(workspace, replace(table, record=ProbeRecord.of(embedded)), "25%")
        assert advice is not None
        assert advice.reason.startswith("head gates are recommended for choosing the heads")
        assert (
            advice.command
            == f"spkv-nas probe --signal head-gates --budget 25% --workspace {tmp_path}"
        )
        for signal in ("head-gates", "duo", "add-one-head"):
            assert (
                recommend(
                    workspace,
                    replace(
                        table,
                        record=ProbeRecord.of({**embedded, "signal": signal, "kind": "share"}),
                    ),
                )
                is None
            )
        assert recommend(workspace, table) is None

    def test_the_default_is_that_of_the_help(self) -> None:
        field = next(field for field in fields(ProbeOptions) if field.name == "ablation_tokens")
        assert field.metadata[SHOWN] == f"{ABLATION_TOKENS:,}"

    def test_left_out_or_impossible(
        self, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["probe", *options, "--ablation-tokens", "0"])
        assert HeadScores.read(tmp_path / "w" / "probes" / "mine").gains is None
        assert "validated" not in capsys.readouterr().err
        options[options.index("64")] = "6"
        main(["probe", *options])
        assert (
            "the ranking was not validated: blocks of 6 tokens have no keys beyond"
            in capsys.readouterr().err
        )
        assert HeadScores.read(tmp_path / "w" / "probes" / "mine").gains is None
        message = "--ablation-tokens does not apply to --signal duo; it applies to density"
        assert message in fails(
            capsys, "probe", *options, "--signal", "duo", "--ablation-tokens", "64"
        )


def test_the_page_says_how_far_the_ranking_is_reliable(tmp_path: Path) -> None:
    table, layouts = make_table(LEFT), make_layouts("densest")
    result = Trust.of(table.values, layouts["densest"].global_mask, gains())
    text = write_report(tmp_path / "one", ReportInputs(table, layouts, trust=result)).read_text(
        encoding="utf-8"
    )
    assert result.sentence()[1:].replace(" %", "\u00a0%").replace(
        " ± ", "\u00a0±\u00a0"
    ) in unescape(text)
    plain = write_report(tmp_path / "two", ReportInputs(table, layouts)).read_text(encoding="utf-8")
    assert "Reliability of the ranking" in text
    assert "Reliability of the ranking" not in plain
    assert ReportInputs(table, layouts).trust is None
