"""Test signals of installed packages: a real package is built, and the command line finds its signals."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from helpers import tiny_model
from paths import ROOT, TESTS
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import spkv_nas
from spkv_nas.artifacts.defaults import RECOMMENDED
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.kinds import KINDS
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.flag import Flag
from spkv_nas.data.batches import run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.data.splits import load_text
from spkv_nas.evaluation.checked_calls import checked_calls
from spkv_nas.model.checkpoint import save
from spkv_nas.probing.signals import SIGNALS, Signal, Steps
from spkv_nas.stages.flags import takers_note, with_options_of
from spkv_nas.stages.options import SubjectOptions
from spkv_nas.stages.options.probe import ProbeOptions

PLUGIN = TESTS / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds the package, as ``pip install --target`` leaves it."""
    folder = tmp_path_factory.mktemp("plugin")
    arguments = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        str(folder / "wheel"),
    ]
    subprocess.run(arguments, cwd=PLUGIN, check=True, capture_output=True, timeout=300)
    (wheel,) = (folder / "wheel").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "160", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "spkv_nas", *map(str, words)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def output(installed: Path, *words: str | Path) -> str:
    done = run(installed, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_command_line_takes_a_signal_of_a_package(
    installed: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """From --help to the report, which shows the table also once the package is removed."""
    model, text = tiny_model(vocab_size=300), tmp_path / "text.txt"
    save(model, tiny_tokenizer, tmp_path / "mine")
    text.write_text("".join(f"the fox {(7 * i) % 31} jumps over {i}. " for i in range(60)))
    subject = ("--model", tmp_path / "mine", "--data", text, "--context", "32", "-w", tmp_path)
    # Help
    help_text = re.sub(r"[│\s]+", " ", output(installed, "probe", "--help"))
    assert "value-norm: mean norm of a head's values" in help_text
    assert re.search(
        r"--order .*Order p of the norm\. Applies to value-norm\. .*default: \(2\.0\)", help_text
    )
    # Cost
    planned = json.loads(
        output(installed, "probe", *subject, "--signal", "value-norm", "--dry-run", "--json")
    )
    assert [stage["name"] for stage in planned["stages"]] == ["signal value-norm"]
    # Scores
    output(installed, "probe", *subject, "--signal", "value-norm", "--order", "1", "--window", "4")
    table = HeadScores.read(tmp_path / "probes" / "mine-value-norm")
    facts = ("signal", "kind", "unit", "order")
    assert [table.record.entries()[name] for name in facts] == [
        "value-norm",
        "score",
        "p-norm",
        1.0,
    ]
    assert (
        (tmp_path / "probes" / "mine-value-norm" / "density.csv")
        .read_text()
        .startswith("layer,kv_head,score,")
    )
    blocks = load_text([str(text)], tiny_tokenizer, tmp_path / "cache", Path(), block_size=32)
    assert (
        table.record.entries()["tokens"]
        == blocks.tokens.size
        == planned["stages"][0]["tokens"] // 32 * 32
    )
    assert 0.0 < table.values.std() < table.values.min()
    # Layouts and the page, without the package
    probe = ("--probe", "mine-value-norm", "-w", tmp_path)
    output(tmp_path, "propose", *probe, "--budget", "3")
    output(tmp_path, "report", *probe)
    page = (tmp_path / "reports" / "mine-value-norm" / "index.html").read_text()
    assert "Value-norm score, p-norm" in page
    assert "The signal value-norm: p-norm; higher for KV heads that need global attention." in page
    # A wrong option
    done = run(installed, "probe", *subject, "--signal", "duo", "--order", "1")
    assert done.returncode == 2
    assert "--order does not apply to --signal duo; it applies to value-norm" in done.stderr


@pytest.mark.slow
def test_the_command_line_takes_an_export_target_of_a_package(
    installed: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Its option is a flag, which another target refuses."""
    save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "dense")
    Layout(("GL", "LL", "LG", "GG"), 6).write(tmp_path / "layout.yaml")
    arguments = (
        "export",
        tmp_path / "layout.yaml",
        "--model",
        tmp_path / "dense",
        "--out",
        tmp_path / "out",
    )
    help_text = re.sub(r"[│\s]+", " ", output(installed, "export", "--help"))
    assert re.search(
        r"--indent .*Spaces of indentation\. Applies to windows\. .*default: \(0\)", help_text
    )
    done = run(installed, *arguments, "--to", "spkv", "--indent", "2")
    assert done.returncode == 2
    assert "an export to spkv has no option 'indent'" in done.stderr
    assert "its windows are those of the layout" in output(
        installed, *arguments, "--to", "windows", "--indent", "2"
    )
    assert (
        (tmp_path / "out" / "windows.json").read_text().startswith("[\n  [\n    null,\n    6\n  ]")
    )


def test_the_tutorial_shows_this_package() -> None:
    """The tutorial's code is that of the package, which ``test_documentation`` runs."""
    page = (ROOT / "docs" / "tutorials" / "extend.md").read_text()
    for file, language in (
        ("value_norm.py", "python"),
        ("windows.py", "python"),
        ("pyproject.toml", "toml"),
    ):
        assert f"```{language}\n{(PLUGIN / file).read_text()}```" in page


def test_what_every_signal_declares() -> None:
    assert RECOMMENDED in SIGNALS.names
    options = SIGNALS.shared_options()
    declared = {field.name for field in fields(ProbeOptions)}
    for signal in SIGNALS:
        assert not signal.help.endswith(".")
        assert signal.kind in KINDS
        assert len(signal.help) * len(signal.unit) > 0
        assert signal.options().keys() <= options.keys() <= declared
        assert signal.work((4, 2), 4096, 512).tokens <= 4096


@pytest.mark.parametrize(
    ("signal", "options", "passes", "tokens"),
    [
        ("density", {}, 1.0, 4096),
        ("head-gates", {}, 150, 2048),
        ("head-gates", {"steps": 2, "budget": "3"}, 6, 2048),
        ("add-one-head", {}, 1 + 5 / 2 * 2, 4096),
        ("regression", {"num_layouts": 9}, 10, 4096),
        ("duo", {}, 600, 1024),
        ("duo", {"steps": 5}, 15, 1024),
        ("retrieval", {"seed": 1}, 1.0, 4096),
        ("attention-mass", {}, 1.0, 4096),
    ],
)
def test_passes(signal: str, options: dict[str, object], passes: float, tokens: int) -> None:
    work = SIGNALS[signal].with_options(options).work((4, 2), 4096, 512)
    assert (work.passes * work.effort, work.tokens) == (passes, tokens)


@dataclass(frozen=True)
class _Other(Signal):
    name, help = "other", "another"

    def measure(self, *arguments: Any, **options: Any) -> HeadScores:
        raise AssertionError("only its options are read")


@dataclass(frozen=True)
class _Steps(_Other):
    steps: Steps = 7


@dataclass(frozen=True)
class _OtherSteps(_Other):
    steps: Annotated[int, Flag("Other steps.")] = 7


@dataclass(frozen=True)
class _Data(_Other):
    data: Annotated[int, Flag("Numbers.")] = 7


def test_signals_may_share_an_option_but_not_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIGNALS.entries, "other", _Steps())
    steps = SIGNALS.shared_options()["steps"]
    assert takers_note([*steps.defaults]) == "Applies to density, head-gates, duo and other."
    assert steps.default_text == "density: 160; head-gates: 50; duo: 200; other: 7"
    SIGNALS.check_options(SIGNALS["other"], {"steps": 3})
    monkeypatch.setitem(SIGNALS.entries, "other", _OtherSteps())
    with pytest.raises(
        UserError, match="signals density and other declare --steps with different flags"
    ):
        SIGNALS.shared_options()


def test_an_option_cannot_have_the_name_of_one_of_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIGNALS.entries, "other", _Data())
    with pytest.raises(
        UserError, match=r"signal other has an option 'data', which is one of probe itself"
    ):
        with_options_of(SIGNALS, "probe")(type("Options", (SubjectOptions,), {}))


@dataclass(frozen=True)
class _Careless(Signal):
    """Signal that gives the model one wrong argument."""

    name, help = "careless", "passes tokens as they come"

    argument: str = "input_ids"

    def measure(self, model: Any, blocks: TokenBlocks, window: int, **_run: Any) -> HeadScores:
        def run(start: int, tokens: Tensor) -> Tensor:
            if self.argument == "blocks.tokens":
                some = torch.from_numpy(blocks.tokens[start : start + len(tokens), :-1]).long()
                return model(some, use_cache=False).logits
            wrong = {"use_cache": True, "attention_mask": torch.ones_like(tokens)}
            arguments = {**blocks.boundaries.inputs(tokens), "use_cache": False}
            return model(**{**arguments, self.argument: wrong.get(self.argument, tokens)}).logits

        run_own_batches(run, lambda *_: None, blocks, 2, model.device)
        raise AssertionError("the model took the tokens")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "input_ids",
            r"marked tokens .* as input_ids: call it with \*\*blocks\.boundaries\.inputs\(tokens\)",
        ),
        (
            "labels",
            r"marked tokens .* as labels: call it with \*\*blocks\.boundaries\.inputs\(tokens\)",
        ),
        (
            "use_cache",
            r"several documents and a cache, with which they attend to each other: .* use_cache=False",
        ),
        (
            "attention_mask",
            r"several documents and an attention_mask, with which they .*: leave the mask out",
        ),
        (
            "blocks.tokens",
            r"a block of several separate documents as one, .*: call it with \*\*blocks\.boundaries\.inputs\(tokens\)",
        ),
    ],
)
def test_calls_that_mix_documents_are_refused(
    argument: str, message: str, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A signal is told what to call; marked tokens ended in an IndexError, and the others in wrong numbers."""
    model, texts = tiny_model(vocab_size=300), [f"the fox {number} jumps. " for number in range(9)]
    blocks = spkv_nas.build_blocks(texts, tiny_tokenizer, block_size=32, documents="separate")
    with pytest.raises(UserError, match=f"^signal careless gives the model {message}") as error:
        spkv_nas.probe(model, blocks, signal=_Careless(argument), window=4)
    assert "\n" not in str(error.value)
    with pytest.raises(IndexError):
        model(torch.tensor([[-1]]))  # the model itself is as before


def test_calls_that_mix_no_documents_are_allowed(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """A padded batch, whose positions begin after its padding, and a block of one document are answered as before."""
    model = tiny_model(vocab_size=300)
    texts = ["the fox jumps. ", "the fox jumps over the dog. " * 20]
    blocks = spkv_nas.build_blocks(texts, tiny_tokenizer, block_size=32, documents="separate")
    tokens = torch.from_numpy(blocks.tokens[1:3]).long()
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    with checked_calls(model, "signal careful", blocks):
        model(tokens, use_cache=False)
        model(tokens, attention_mask=mask, position_ids=positions)
        model.generate(tokens, attention_mask=mask, max_new_tokens=2, do_sample=False)


def test_a_signal_of_a_package_is_one_class_with_its_options(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """It is measured by its class alone, with the options that its fields are."""
    specification = importlib.util.spec_from_file_location("value_norm", PLUGIN / "value_norm.py")
    assert specification is not None
    assert specification.loader is not None
    package = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(package)
    model = tiny_model(vocab_size=300)
    blocks = spkv_nas.build_blocks(
        ["the fox jumps over the dog. " * 20], tiny_tokenizer, block_size=32
    )
    tables = [
        spkv_nas.probe(model, blocks, signal=package.ValueNorm(order), window=4)
        for order in (1.0, 2.0)
    ]
    assert [table.record.entries()["order"] for table in tables] == [1.0, 2.0]
    assert (tables[0].values > tables[1].values).all()
    with pytest.raises(UserError, match=r"order must be at least 1; found 0\.5"):
        spkv_nas.probe(model, blocks, signal=package.ValueNorm(), window=4, order=0.5)
