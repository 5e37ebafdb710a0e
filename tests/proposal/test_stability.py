"""Test the certainty of a choice of heads: counts by document, their bootstrap, and the agreement of probes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import Page, all_logits, fails, make_layouts, scatter_gates, tiny_model

from spkv_nas.artifacts.gate_config import GateConfig
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.histogram import (
    MAX_DOCUMENTS,
    DocumentCounts,
    LogitHistogram,
    group_documents,
)
from spkv_nas.artifacts.result_tables import PROBE_PAIRS
from spkv_nas.artifacts.threshold import threshold_logit
from spkv_nas.base.errors import UserError
from spkv_nas.cli import main
from spkv_nas.contrib.compare.stage import agreement, parse_probe, short_labels
from spkv_nas.data.blocks import DocumentInfo, TokenBlocks
from spkv_nas.model.attach import attach_gates
from spkv_nas.probing.density import probe
from spkv_nas.proposal.constraints import Constraints
from spkv_nas.proposal.coverage import NUM_SOLVED, Certainty, beyond_doubt, bootstrap, caution, knee
from spkv_nas.proposal.requirements import Limit, Requirements
from spkv_nas.proposal.strategies import densest
from spkv_nas.report.inputs import ReportInputs
from spkv_nas.report.page import write_report

EDGES, FINE = np.linspace(-6, 6, 5), np.linspace(-6, 6, 121)


def make_probe(
    seed: int = 0, num_documents: int = 40, shape: tuple[int, int] = (4, 2), name: str = "p"
) -> HeadScores:
    """Make a probe's table of two domains, from normal logits whose mean varies by head and by document."""
    generator = np.random.default_rng(seed)
    mean = np.random.default_rng(99).normal(0, 2, (1, *shape, 1))
    domain = np.arange(num_documents) % 2
    tokens = generator.integers(50, 200, num_documents)
    inside = np.arange(200) < tokens[:, None, None, None]
    logits = mean + domain[:, None, None, None] + generator.normal(0, 1, (num_documents, *shape, 1))
    logits = np.where(inside, logits + generator.normal(0, 1, (num_documents, *shape, 200)), np.nan)
    fine = _histogram(logits, FINE)
    counts = DocumentCounts(
        (logits >= 0).sum(-1).astype(float),
        tokens,
        domain,
        ("code", "docs"),
        _histogram(logits, EDGES),
        EDGES,
    )
    rows = [
        {
            "layer": layer,
            "kv_head": head,
            "score": density,
            "domain": ("code", "docs")[number],
            "num_tokens": tokens[domain == number].sum(),
            "num_documents": 20,
            "standard_error": 0.01,
        }
        for (number, layer, head), density in np.ndenumerate(counts.density())
    ]
    histogram = LogitHistogram(
        FINE, np.stack([fine[domain == i].sum(0) for i in (0, 1)]), ("code", "docs")
    )
    return HeadScores(name, pd.DataFrame(rows), window=8, histogram=histogram, documents=counts)


def _histogram(logits: np.ndarray, edges: np.ndarray) -> np.ndarray:
    bins = np.where(np.isnan(logits), -1, np.searchsorted(edges, logits, side="right"))
    return np.stack([(bins == i).sum(-1) for i in range(len(edges) + 1)], axis=-1)


class TestDocumentCounts:
    @pytest.mark.parametrize("batch_size", [1, 4])
    def test_a_probe_counts_every_document(self, batch_size: int, tmp_path: Path) -> None:
        model = tiny_model()
        attach_gates(model, GateConfig(window=6, hidden_size=16))
        scatter_gates(model)
        tokens = np.random.default_rng(0).integers(3, 97, size=(9, 32)).astype(np.int32)
        owner = np.repeat(np.arange(12, dtype=np.int32), 24).reshape(9, 32)
        blocks = TokenBlocks(
            tokens, owner, tuple(DocumentInfo(str(i), "ab"[i % 2], str(i)) for i in range(12))
        )
        table = probe(model, blocks, 0.5, batch_size=batch_size)
        table.write(tmp_path)
        logits = all_logits(model, blocks, 0.5).transpose(1, 2, 0, 3).reshape(4, 2, -1)
        for result in (table.documents, HeadScores.read(tmp_path).documents):
            assert result is not None
            # Groups go domain by domain
            order = np.lexsort((np.arange(12) // 2, np.arange(12) % 2))
            assert result.tokens.tolist() == [24] * 12
            assert result.domain.tolist() == [0] * 6 + [1] * 6
            kept = (logits >= 0).reshape(4, 2, 12, 24).sum(-1).transpose(2, 0, 1)
            np.testing.assert_array_equal(result.kept, kept[order])
            assert result.bins.sum(-1).tolist() == np.full((12, 4, 2), 24).tolist()
        for tau in (0.2, 0.7):
            assert table.documents is not None
            exact = (
                (logits >= threshold_logit(tau))
                .reshape(4, 2, 12, 24)
                .sum(-1)
                .transpose(2, 0, 1)[order]
            )
            other = table.at_tau(tau).documents
            assert other is not None
            # Of 24 tokens, split within a bin of 0.1
            assert np.abs(other.kept - exact).mean() < 0.2

    @pytest.mark.parametrize("tau", [0.0, 0.001, 0.3, 0.5, 0.93, 0.9999, 1.0])
    def test_documents_add_up_to_the_table_at_every_threshold(self, tau: float) -> None:
        table = make_probe().at_tau(tau)
        assert table.documents is not None
        density = np.stack([table.domain_density(domain) for domain in table.domains])
        np.testing.assert_allclose(table.documents.density(), density, atol=1e-9)
        assert (table.documents.kept <= table.documents.tokens[:, None, None] + 1e-9).all()
        assert (table.documents.kept >= -1e-9).all()

    def test_a_large_histogram_has_wider_bins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model()
        attach_gates(model, GateConfig(window=6, hidden_size=16))
        tokens = np.random.default_rng(0).integers(3, 97, size=(2, 32)).astype(np.int32)
        blocks = TokenBlocks(tokens, 0 * tokens, (DocumentInfo("0", "a", "0"),))
        widths = []
        for limit in (10**6, 4 * 2 * 100, 1):
            monkeypatch.setattr("spkv_nas.probing.counting.DOCUMENT_CELLS", limit)
            counts = probe(model, blocks).documents
            assert counts is not None
            assert counts.bins.shape[-1] == len(counts.edges) + 1
            assert counts.bins.sum(-1).tolist() == np.full((1, 4, 2), 64).tolist()
            widths.append(counts.edges[1] - counts.edges[0])
        assert widths == pytest.approx([0.1, 0.4, 1.6])

    def test_many_documents_are_pooled_within_their_domain(self) -> None:
        domain = np.array([0] * 1000 + [1] * 3)
        group, number = group_documents(domain, 2)
        assert number == MAX_DOCUMENTS // 2 + 3
        assert sorted(set(group)) == list(range(number))
        assert not set(group[domain == 0]) & set(group[domain == 1])
        assert np.bincount(group)[: MAX_DOCUMENTS // 2].min() >= 1000 // (MAX_DOCUMENTS // 2)

    def test_a_file_of_another_table_is_refused(self, tmp_path: Path) -> None:
        make_probe().write(tmp_path)
        text = (tmp_path / "density.csv").read_text()
        (tmp_path / "density.csv").write_text(text.replace("0,0,0.", "0,0,0.0", 1))
        with (
            pytest.warns(
                UserWarning, match=r"density\.csv: edited or damaged after it was written"
            ),
            pytest.raises(UserError, match=r"documents\.npz does not add up"),
        ):
            HeadScores.read(tmp_path)
        make_probe(shape=(3, 2)).write(tmp_path / "other")
        (tmp_path / "density.csv").write_text(text)
        (tmp_path / "other" / "documents.npz").rename(tmp_path / "documents.npz")
        with pytest.raises(
            UserError, match=r"documents\.npz is damaged: it does not match probe\.yaml"
        ):
            HeadScores.read(tmp_path)
        record = tmp_path / "probe.yaml"
        record.write_text(re.sub(r"\Asha256:\n(?: .*\n)*", "", record.read_text()))
        with pytest.raises(
            UserError, match=r"documents\.npz does not belong to the table in its folder"
        ):
            HeadScores.read(tmp_path)
        (tmp_path / "documents.npz").write_text("junk")
        with pytest.raises(UserError, match=r"documents\.npz is damaged"):
            HeadScores.read(tmp_path)

    def test_a_probe_without_documents_gives_no_interval(self, tmp_path: Path) -> None:
        make_probe().write(tmp_path)
        (tmp_path / "documents.npz").unlink()
        table = HeadScores.read(tmp_path)
        assert bootstrap(table) is None
        assert "no confidence interval available" in (caution(table) or "")
        replace(make_probe(), documents=None).write(tmp_path)
        assert not (tmp_path / "documents.npz").exists()


class TestBootstrap:
    def test_its_spread_is_the_standard_error_by_document(self) -> None:
        table = make_probe(num_documents=60)
        documents, resampled = table.documents, bootstrap(table)
        assert documents is not None
        assert resampled is not None
        expected = np.zeros((4, 2))
        for number, density in enumerate(documents.density()):
            mine = documents.take(documents.domain == number)
            residual = mine.kept - mine.tokens[:, None, None] * density
            expected += (residual**2).sum(0) / documents.tokens.sum() ** 2
        np.testing.assert_allclose(resampled.density.std(0), np.sqrt(expected), rtol=0.1)
        np.testing.assert_allclose(resampled.density.mean(0), table.density, atol=0.01)

    def test_intervals_have_about_the_stated_coverage(self) -> None:
        """95 % intervals of the coverage of four fixed heads, over 60 probes of one model."""
        truth = make_probe(seed=10**6, num_documents=2000).density
        mask = densest(truth, 4)
        held = 0
        for seed in range(60):
            resampled = bootstrap(make_probe(seed, num_documents=40))
            assert resampled is not None
            low, high = resampled.coverage(mask)
            held += low <= truth[mask].sum() / truth.sum() <= high
        assert 50 <= held <= 60

    def test_the_curve_holds_the_choice_fixed(self) -> None:
        table = make_probe()
        resampled = bootstrap(table)
        assert resampled is not None
        curve = resampled.curve()
        for budget in (1, 3, 8):
            assert resampled.coverage(densest(table.density, budget)) == pytest.approx(
                curve.loc[budget - 1, ["low", "high"]].tolist()
            )
        assert curve.loc[7, ["low", "high"]].tolist() == pytest.approx([1.0, 1.0])

    def test_probabilities_are_frequencies_of_the_choice(self) -> None:
        table = make_probe(num_documents=8)
        resampled = bootstrap(table)
        assert resampled is not None
        resampled = replace(resampled, domain_density=resampled.domain_density[:NUM_SOLVED])
        result = resampled.probability(3)
        assert result.sum() == pytest.approx(3)
        assert 0 < sum(beyond_doubt(result)[:2]) < 8
        solved = Requirements(Constraints(max_per_layer=2)).probability(resampled, Limit(3))
        np.testing.assert_allclose(solved, result)  # two is all that a layer has

    def test_equal_heads_have_no_certainty(self) -> None:
        """Heads that are equal in every document are undecided, not chosen by position."""
        table = make_probe()
        assert table.documents is not None
        counts = replace(
            table.documents,
            kept=np.broadcast_to(table.documents.kept[:, :1, :1], table.documents.kept.shape),
        )
        equal = replace(table, documents=counts)
        assert bootstrap(equal) is None
        assert "all heads have the same score" in (caution(equal) or "")

    def test_limits_of_resampling_are_reported(self) -> None:
        table = make_probe(num_documents=40)
        assert caution(table) is None
        assert table.documents is not None
        one = table.documents.take((table.documents.domain == 0) | (np.arange(40) == 1))
        assert "single document: docs" in (caution(replace(table, documents=one)) or "")
        assert "8 documents" in (caution(make_probe(num_documents=8)) or "")
        single = replace(table, documents=table.documents.take(np.arange(40) < 2))
        assert "one document per domain" in (caution(single) or "")
        assert bootstrap(single) is None

    def test_certainty_in_words(self) -> None:
        table = make_probe()
        resampled = bootstrap(table)
        assert resampled is not None
        certainty = Certainty.of(resampled, {"densest": make_layouts("densest")["densest"]}, 2)
        first, last = certainty.sentences()
        assert "densest: coverage" in first
        assert "of 8 heads" in first
        assert last.startswith(f"knee: {knee(table)} heads (95 % interval ")
        heads = certainty.heads(table)
        assert list(heads.columns) == ["layer", "kv_head", "density", "densest"]
        assert heads["densest"].sum() == pytest.approx(2)


class TestAgreement:
    def test_agreement_of_a_table_with_itself_and_its_opposite(self) -> None:
        table = make_probe()
        opposite = replace(table, name="o", rows=table.rows.assign(score=1 - table.rows["score"]))
        rows = agreement({"p": table, "q": table, "o": opposite}, 4).set_index(["first", "second"])
        assert rows.loc[("p", "q"), ["jaccard", "spearman", "transfer"]].tolist() == pytest.approx(
            [1, 1, 1]
        )
        assert rows.loc[("p", "o"), ["jaccard", "spearman"]].tolist() == pytest.approx([0, -1])
        assert rows.loc[("p", "o"), "transfer"] < 1
        assert rows["chance"].tolist() == pytest.approx([1 / 3] * 3)

    def test_halves_are_disjoint_and_make_up_the_whole(self) -> None:
        table = make_probe()
        even, odd = (half.rows for _, half in parse_probe("p", lambda _: table, "half"))
        kept = even["score"] * even["num_tokens"] + odd["score"] * odd["num_tokens"]
        np.testing.assert_allclose(
            kept / (even["num_tokens"] + odd["num_tokens"]), table.rows["score"]
        )
        assert not np.isclose(even["score"], odd["score"], rtol=1e-3).all()
        assert even["num_tokens"].sum() != odd["num_tokens"].sum()

    def test_parts_and_thresholds_have_labels(self) -> None:
        table = make_probe()
        labels = [
            label
            for by in (None, "domain", "half")
            for label, _ in parse_probe("p@0.7", lambda _: table, by)
        ]
        assert labels == ["p@0.7", "p@0.7:code", "p@0.7:docs", "p@0.7:even", "p@0.7:odd"]
        assert next(parse_probe("p@0.7", lambda _: table))[1].tau == 0.7
        rows = pd.DataFrame({"first": ["p:code", "p:code"], "second": ["p:docs", "p:a"]})
        assert list(short_labels(rows).values()) == ["code", "docs", "a"]

    def test_the_file_can_be_read_again(self, tmp_path: Path) -> None:
        rows = agreement({"p": make_probe(), "q": make_probe(1)}, 4).assign(spearman=np.nan)
        PROBE_PAIRS.write(tmp_path, rows, {})
        read, _ = PROBE_PAIRS.read(tmp_path)
        pd.testing.assert_frame_equal(read, rows, check_dtype=False, rtol=1e-5)
        header = ",".join(rows.columns)
        (tmp_path / "agreement.yaml").unlink()
        for text, message in [
            ("first,second\na,b\n", "agreement.csv: column 'budget' is missing"),
            (
                f"{header}\na,b,4,0.5,0.3,x,0.9,0.1\n",
                "agreement.csv, line 2: column 'spearman' must be a number",
            ),
        ]:
            (tmp_path / "agreement.csv").write_text(text)
            with pytest.raises(UserError, match=message):
                PROBE_PAIRS.read(tmp_path)


class TestCommands:
    @pytest.fixture
    def workspace(self, tmp_path: Path) -> Path:
        make_probe().write(tmp_path / "probes" / "p")
        make_probe(1, name="q").write(tmp_path / "probes" / "q")
        return tmp_path

    @pytest.mark.slow
    def test_from_probe_to_report(
        self, workspace: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ["--workspace", str(workspace)]
        main(
            [
                "propose",
                "--probe",
                "p",
                "--budget",
                "3",
                "--tau",
                "match-budget",
                "--constraint",
                "uniform",
                *options,
            ]
        )
        printed = " ".join(capsys.readouterr().out.split())
        assert "densest: coverage" in printed
        assert "constrained: coverage" in printed
        heads = pd.read_csv(workspace / "layouts" / "p" / "heads.csv")
        assert list(heads.columns) == ["layer", "kv_head", "density", "densest", "constrained"]
        rows = pd.read_csv(workspace / "layouts" / "p" / "coverage.csv")
        assert (
            (rows["coverage_low"] <= rows["coverage"]) & (rows["coverage"] <= rows["coverage_high"])
        ).all()
        main(["compare", "p", "q", "p@0.7", "--budget", "3", *options])
        assert "transfer" in capsys.readouterr().out
        main(
            ["compare", "p", "--split-by", "half", "--budget", "25%", "--name", "halves", *options]
        )
        main(["report", "--probe", "p", *options])
        folder = workspace / "reports" / "p"
        text = (folder / "index.html").read_text(encoding="utf-8")
        page = Page(text)
        assert (folder / "stability.png").is_file()
        assert "p@0.7" in page.texts["td"]
        assert "selected in % % of the resamples" in page.texts["script"][0]
        assert "95\u00a0% interval" in text

    def test_a_table_of_the_same_name_is_called_by_its_file(
        self, workspace: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_probe(2).write(workspace / "elsewhere")
        for given in ("elsewhere/density.csv", "elsewhere"):
            path = str(workspace / given)
            main(
                [
                    "compare",
                    "p",
                    path,
                    "--budget=3",
                    "--name",
                    "both",
                    "--workspace",
                    str(workspace),
                ]
            )
            assert pd.read_csv(workspace / "reports/both/agreement.csv")["second"].tolist() == [
                path
            ]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["p"], "at least two probes"),
            (["p", "p"], "'p' is given twice"),
            (["p", "none"], "no probe 'none'"),
            (["p", "mistyped/density"], "no probe 'mistyped/density'"),
            (
                ["p", "other"],
                "the probe 'other' is for 3 layers x 2 KV heads, 'p' has 4 layers x 2 KV heads",
            ),
            (["p", "p@x"], "must be a number in [0, 1]"),
            (["p", "p@2"], "[0, 1]"),
            (["p", "q", "--split-by=layer"], "--split-by must be domain or half; found 'layer'"),
            (["p", "q", "--budget=9"], "the model has 8"),
            (["p", "p@1"], "every head density of 'p@1' is 0"),
            (["bare", "--split-by=half"], "probe two parts of the text under different names"),
            (["bare", "--split-by=domain"], "has a single domain"),
        ],
    )
    def test_bad_comparisons(
        self,
        arguments: list[str],
        message: str,
        workspace: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        make_probe(shape=(3, 2), name="other").write(workspace / "probes" / "other")
        bare = make_probe(name="bare")
        replace(bare, rows=bare.rows[bare.rows["domain"] == "code"], documents=None).write(
            workspace / "probes" / "bare"
        )
        options = [
            *arguments,
            *([] if "--budget=9" in arguments else ["--budget=3"]),
            f"--workspace={workspace}",
        ]
        assert message in fails(capsys, "compare", *options)
        assert not (workspace / "reports").exists()


def test_a_report_without_counts_by_document_says_so(tmp_path: Path) -> None:
    table = replace(make_probe(), documents=None)
    text = write_report(tmp_path, ReportInputs(table, {})).read_text(encoding="utf-8")
    Page(text)
    assert "No confidence interval available" in text
    assert not (tmp_path / "stability.png").exists()
