"""Measure how often `spkv-nas auto` passes a memory whose layout truly loses more than the margin.

    python reports/auto_risk.py MODEL PROBE TEXT... --blocks 256 --splits 200

MODEL is a folder, PROBE a folder with costs of windows (`spkv-nas probe --signal window-costs`), TEXT files or folders.
Every layout of the memories is measured once on blocks of text without the probe's documents; the loss on all of them
is the truth. Each split draws half of the documents, in random order, and looks for the smallest memory as the command
does.
Scores are kept in --cache, so that an interrupted run goes on.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

import spkv_nas
from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.arrays import Float
from spkv_nas.data.splits import load_text
from spkv_nas.evaluation.verdict.contenders import Contender
from spkv_nas.evaluation.verdict.criteria import parse_margins
from spkv_nas.evaluation.verdict.critical_budget import find_critical_budget
from spkv_nas.evaluation.verdict.trial import Trial
from spkv_nas.evaluation.zero_shot import zero_shot
from spkv_nas.proposal.budget import MEMORIES
from spkv_nas.proposal.requirements import Requirements
from spkv_nas.proposal.windows import layouts_by_memory


@dataclass
class Documents:
    """Samples of one split: NLL sums [n] of its documents in random order, in rounds, by layout; "" is dense."""

    sums: dict[str, Float]
    size: int = 16
    contender = Contender("")

    @property
    def num_samples(self) -> int:
        """Return the number of documents."""
        return len(self.sums[""])

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds."""
        return -(-self.num_samples // self.size)

    def score(self, contender: Contender, _rounds: Any, number: int) -> Float:
        """Return the sums of the first rounds."""
        return self.sums[contender.name][: number * self.size]


def measured(
    model: PreTrainedModel, layouts: dict[str, Any], blocks: Any, cache: Path
) -> dict[str, Float]:
    """Return the NLL sums of the documents under full attention ("") and every layout."""
    sums = {}
    for name, layout in {"": None, **layouts}.items():
        file = cache / f"{name or 'dense'}.npy"
        if not file.is_file():
            (score,) = zero_shot(model, [layout], blocks, batch_size=2)
            np.save(file, score.total)
        sums[name] = np.load(file)
    return sums


def main() -> None:
    """Measure the layouts, and count wrong passes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("probe", type=Path)
    parser.add_argument("text", nargs="+")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--risk", type=float, default=0.05)
    parser.add_argument(
        "--most", type=float, default=22.0, help="largest memory to measure, in percent"
    )
    parser.add_argument("--cache", type=Path, default=Path("runs/auto-risk"))
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    # Make the layouts, and measure them on documents not used for selection
    table = HeadScores.read(options.probe)
    cost = Requirements(kv_bytes="20%").cache_cost(table, None)
    assert cost is not None
    layouts = layouts_by_memory(table, cost, [each for each in MEMORIES if each <= options.most])
    names = {f"{percent:g}%": layout for percent, layout in layouts.items()}
    model, tokenizer = spkv_nas.load(options.model)
    size = min(2048, model.config.max_position_embeddings)
    whole = load_text(
        options.text, tokenizer, options.cache / "blocks", Path(), block_size=size, separator="bos"
    )
    blocks = whole.in_random_order(0, table.selected_on or ()).spread(options.blocks)
    sums = measured(model, names, blocks, options.cache)
    present = sums[""] > 0
    sums = {name: each[present] for name, each in sums.items()}
    truth = {name: 100.0 * (each.sum() / sums[""].sum() - 1.0) for name, each in sums.items()}
    print(
        f"{present.sum()} documents; true loss, %: "
        + ", ".join(f"{name} {truth[name]:.2f}" for name in names)
    )
    # Look for the smallest memory in every split
    candidates = [Contender(name, layout=layout, chosen=layout) for name, layout in names.items()]
    rng = np.random.default_rng(0)
    for margin in ("nll=0.5%", "nll=1%", "nll=2%"):
        limit, found = float(margin[4:-1]), []
        for _ in range(options.splits):
            drawn = rng.permutation(int(present.sum()))[: int(present.sum()) // 2]
            documents = Documents({name: each[drawn] for name, each in sums.items()})
            margins = parse_margins(margin)
            trial = Trial(margins, {"nll": documents}, documents)  # type: ignore[arg-type, dict-item]
            nll = table.record.nll
            found.append(
                find_critical_budget(
                    trial, candidates, options.risk, memories=[*layouts], nll=nll
                ).passes
            )
        passed = [each for each in found if each is not None]
        wrong = sum(truth[f"{each:g}%"] > limit for each in passed)
        best = min(
            (percent for percent in layouts if truth[f"{percent:g}%"] <= limit), default=None
        )
        counted = {f"{each:g}%": passed.count(each) for each in sorted({*passed})}
        print(
            f"{margin}: {wrong} of {len(found)} passes are wrong; smallest that truly passes {best}; found {counted}"
        )


if __name__ == "__main__":
    main()
