"""Test measurements in several gloo processes: the tables are those of one process."""

from __future__ import annotations

import math
import pickle
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import gated, make_layouts, tiny_model, torchrun
from measuring_worker import measure_all
from paths import TESTS
from transformers import PreTrainedTokenizerBase

from spkv_nas.base import distributed
from spkv_nas.base.distributed import own_share, sum_over_processes
from spkv_nas.data.batches import num_own_blocks, num_spare_batches, run_own_batches
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.model.checkpoint import save


@pytest.fixture
def ground(tmp_path: Path, text: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write the checkpoints ``gated`` and ``dense``, two layouts, and the text."""
    save(gated(), tiny_tokenizer, tmp_path / "gated")
    save(tiny_model(vocab_size=300), tiny_tokenizer, tmp_path / "dense")
    for name, layout in make_layouts("densest", "last").items():
        layout.write(tmp_path / f"{name}.yaml")
    return tmp_path


@pytest.mark.slow
def test_several_processes_measure_what_one_does(ground: Path) -> None:
    """Every table agrees to 1e-6, also for fewer blocks than processes, and a command prints once."""
    one, several = ground / "one", ground / "several"
    worker = TESTS / "measuring_worker.py"
    done = torchrun(worker, ground, several)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("full-attention") == 1
    assert done.stderr.count("loading ") == 1
    with warnings.catch_warnings():
        # Random models neither copy nor are sums of their heads
        warnings.simplefilter("ignore", UserWarning)
        expected = measure_all(ground, one)
    actual = pickle.loads((several / "found.pickle").read_bytes())
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        if isinstance(values, pd.DataFrame):
            pd.testing.assert_frame_equal(
                actual[name], values, check_exact=False, rtol=1e-6, atol=1e-9, obj=name
            )
        else:
            assert np.allclose(actual[name], values, rtol=1e-6, atol=1e-9), name
    results = [
        {file.relative_to(folder) for file in folder.glob("[pr]*s/*/*.*")}
        for folder in (one, several)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("processes", [1, 3, 16])
@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_every_block_belongs_to_one_process(
    blocks: TokenBlocks, batch_size: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setattr(distributed, "_connected", True)
    seen: list[int] = []
    runs, spare, updates = [], [], []
    for rank in range(processes):
        monkeypatch.setenv("RANK", str(rank))
        passes: list[tuple[int, torch.Tensor]] = []
        run_own_batches(
            lambda _, tokens: tokens,
            lambda start, tokens, passes=passes: passes.append((start, tokens)),
            blocks,
            batch_size,
            torch.device("cpu"),
            lambda done, total: updates.append((done, total)),
        )
        numbers = [
            number for start, tokens in passes for number in range(start, start + len(tokens))
        ]
        assert all(
            np.array_equal(tokens, blocks.tokens[start : start + len(tokens)])
            for start, tokens in passes
        )
        assert all(len(tokens) <= batch_size for _, tokens in passes)
        assert len(numbers) == num_own_blocks(blocks.num_blocks, batch_size)
        assert not passes or updates[-1] == (len(numbers), len(numbers))
        seen += numbers
        runs.append(len(passes))
        spare.append(num_spare_batches(blocks.num_blocks, batch_size))
    assert seen == list(range(blocks.num_blocks))
    assert {run + more for run, more in zip(runs, spare, strict=True)} == {max(runs)}
    assert max(runs) - min(runs) <= 1
    assert max(runs) == math.ceil(math.ceil(blocks.num_blocks / processes) / batch_size)


def test_a_single_process_has_all_blocks() -> None:
    assert own_share(5) == range(5)
    values = np.arange(3.0)
    assert sum_over_processes(values) is values


def test_another_program_under_torchrun_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may measure on one process, which must not wait for the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert distributed.own_share(5) == range(5)
    assert distributed.sum_over_processes(np.ones(3)).tolist() == [1.0] * 3
    assert distributed.on_main(lambda: "here") == "here"
