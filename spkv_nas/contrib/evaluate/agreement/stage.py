"""Compare a model's next tokens with a dense model's, on continuations of held-out text that the dense model writes.

The dense model continues prompts twice: greedily, and by sampling at a temperature. Both models then read each
continuation in one pass (teacher forcing), so that they predict every token from the same context:

- Agreement: the share of positions of the greedy continuation where both models' most probable tokens are equal.
- Acceptance: sum_x min(p(x), q(x)) with the dense model's distribution p and the model's q, the probability that
  speculative sampling accepts a token that the model drafts for the dense model (Leviathan et al., arXiv 2211.17192,
  section 3.2). In greedy decoding both distributions are one-hot, and acceptance equals agreement.
- Tokens per pass of the dense model, where the model drafts gamma tokens for each: the number of tokens over the
  expected number of passes. Speculative sampling accepts a drafted token x of its output with probability
  min(1, q(x) / p(x)), independently of other positions once the output is known, so the expectation over its
  randomness is exact, and in greedy decoding it is a count.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spkv_nas.artifacts.result_tables import AGREEMENT
from spkv_nas.base import arrays, console, distributed, errors, progress, statistics
from spkv_nas.contrib.evaluate import samples
from spkv_nas.contrib.evaluate.agreement.options import TOKENS, AgreementOptions
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import continuations, micro_batch
from spkv_nas.model import model_shape
from spkv_nas.stages import commands
from spkv_nas.stages.subject import Subject, check_pair

GREEDY = "greedy"
SAMPLED = "sampled"
DRAFT_TOKENS = (1, 2, 4, 8)  # tokens that a model drafts for each pass of the dense model
_TEMPERATURES = {GREEDY: 0.0, SAMPLED: 1.0}  # of continuations, by decoding


@dataclass(frozen=True)
class Agreement:
    """Agreement of a model with a dense model on P continuations that the dense one wrote at a temperature.

    ``document`` int [P] is that of each prompt. By token [P, N], NaN after the end of a continuation: ``equal`` is 1
    where the most probable tokens are equal, ``accepted`` the probability that a drafted token is accepted, before it
    is drawn, and ``kept`` the probability that the dense model's token is an accepted draft, if one was drafted there.
    """

    temperature: float
    document: NDArray[np.int64]
    equal: arrays.Float
    accepted: arrays.Float
    kept: arrays.Float

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], temperature: float) -> "Agreement":
        """Collect the records that ``compare`` returns."""

        def column(name: str) -> arrays.Float:
            """Return [P, N] from a list per line, padded with NaN."""
            rows = [torch.tensor(line[name], dtype=torch.float64) for line in lines]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=np.nan)
            return padded.numpy()

        equal = column("equal")
        document = np.array([line["document"] for line in lines], dtype=np.int64)
        if temperature == 0:
            # Greedy drafts are accepted where the most probable tokens are equal
            return cls(temperature, document, equal=equal, accepted=equal, kept=equal)
        return cls(
            temperature, document, equal=equal, accepted=column("accepted"), kept=column("kept")
        )

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Return the number of tokens of each continuation, [P]."""
        return np.asarray((~np.isnan(self.equal)).sum(1))

    def ratio(self, values: NDArray[Any], bases: NDArray[Any]) -> tuple[float, float]:
        """Return (sum of values / sum of bases [P], its standard error), with documents as clusters."""
        _, document = np.unique(self.document, return_inverse=True)
        document_values = np.bincount(document, values).astype(np.float64)
        document_bases = np.bincount(document, bases).astype(np.float64)
        ratio, error = map(float, statistics.jackknife_ratio(document_values, document_bases))
        if error == 0.0 and ratio in (0.0, 1.0):
            error = statistics.unseen_share(len(document_bases)) / statistics.NORMAL_95
        return ratio, error


def expected_passes(kept: arrays.Float, draft_tokens: int) -> arrays.Float:
    """Return the expected number of passes of the dense model for each text, [P].

    In a round the draft model proposes ``draft_tokens`` tokens. One pass of the dense model accepts those up to the
    first rejection, replaces that one, and the next round follows it; if all are accepted, it adds one token itself.
    ``kept`` [P, N] is as in ``Agreement``.
    """
    number, longest = kept.shape
    is_token = ~np.isnan(kept)
    kept = np.nan_to_num(kept)
    # passes[:, i]: passes that follow once the text is written up to token i
    passes = np.zeros((number, longest + draft_tokens + 1))
    # Work backwards: the round after a rejection starts behind the rejected token
    for start in reversed(range(longest)):
        reached = np.ones(number)
        following = np.zeros(number)
        for position in range(start, min(start + draft_tokens, longest)):
            following += reached * (1.0 - kept[:, position]) * passes[:, position + 1]
            reached = reached * kept[:, position]
        # If all drafts are accepted, the dense model adds a token
        following += reached * passes[:, start + draft_tokens + 1]
        passes[:, start] = np.where(is_token[:, start], 1.0 + following, 0.0)
    return passes[:, 0]


def compare(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    blocks: TokenBlocks,
    texts: Sequence[continuations.Line],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    progress: progress.Progress | None = None,
) -> list[continuations.Line]:
    """Compare two models' predictions of the continuations that the dense one wrote; must be called on all ranks.

    The caller sets the gates of the model. Returns a record per continuation: block, document, name, equal, and if
    ``temperature`` is not 0 accepted and kept of ``Agreement``. Raises ``UserError`` if logits are not finite.
    """

    def columns(
        tokens: torch.Tensor, logits: torch.Tensor, dense_logits: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        dense_logits = dense_logits.to(logits.device)
        equal = (logits.argmax(-1) == dense_logits.argmax(-1)).long().cpu()
        if temperature == 0:
            return {"equal": equal}
        log_q = (logits.float() / temperature).log_softmax(-1)
        log_p = (dense_logits.float() / temperature).log_softmax(-1)
        # Sum of min(p, q), as 1 - sum |p - q| / 2: exactly 1 for equal distributions
        accepted = 1.0 - (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
        log_ratio = (log_q - log_p).gather(-1, tokens[..., None].to(log_q.device))[..., 0]
        return {
            "equal": equal,
            "accepted": accepted.cpu(),
            "kept": log_ratio.clamp(max=0.0).exp().cpu(),
        }

    return continuations.by_continuation(
        (model, dense), blocks, texts, new_tokens, columns, progress
    )


def agreement_table(results: Mapping[str, Agreement], draft_tokens: Sequence[int]) -> pd.DataFrame:
    """Return one row per decoding and number of drafted tokens, columns of ``AGREEMENT``, errors by document."""
    rows = []
    for decoding, result in results.items():
        # Compute what does not depend on the number of drafted tokens
        tokens = result.num_tokens
        agreement = result.ratio(np.nansum(result.equal, 1), tokens)
        acceptance = result.ratio(np.nansum(result.accepted, 1), tokens)
        # Add the tokens per pass of the dense model
        for number in draft_tokens:
            per_pass = result.ratio(tokens, expected_passes(result.kept, number))
            counts = (len(np.unique(result.document)), len(tokens), int(tokens.sum()))
            rows.append(
                (decoding, result.temperature, *counts, *agreement, *acceptance, number, *per_pass)
            )
    return pd.DataFrame(rows, columns=AGREEMENT.header)


@dataclass(frozen=True)
class Comparison:
    """A model and a dense one that continues the prompts ``blocks`` by ``new_tokens``; ``folder`` has finished work."""

    model: samples.Checkpoint
    dense: samples.Checkpoint
    blocks: TokenBlocks
    new_tokens: int
    seed: int
    folder: Path
    reporter: progress.Reporter

    def measure(self, decoding: str, temperature: float) -> Agreement:
        """Measure one decoding of the dense model, reusing what is finished."""
        # Continue the prompts
        prompts = hashlib.sha256(self.blocks.tokens.tobytes()).hexdigest()
        seed = f" seed {self.seed}" if temperature else ""
        written_by = self.dense.identity(
            f"{prompts} {self.new_tokens} temperature {temperature}{seed}"
        )
        with self.dense.hard(), self.reporter.bar(f"continuing, {decoding}") as bar:
            write = partial(
                continuations.write_continuations,
                self.dense.model,
                self.dense.tokenizer,
                self.blocks,
                self.new_tokens,
                temperature=temperature,
                seed=self.seed,
                progress=bar,
            )
            texts = samples.kept_samples(
                self.folder, f"{decoding}-continuations", written_by, write
            )
        # Compare the models on the continuations
        compared = self.model.identity(f"{self.model.origin['tau']} after {written_by}")
        bar_title = f"comparing, {decoding}"
        with self.model.hard(), self.dense.hard(), self.reporter.bar(bar_title) as bar:
            compare_both = partial(
                compare,
                self.model.model,
                self.dense.model,
                self.blocks,
                texts,
                self.new_tokens,
                temperature=temperature,
                progress=bar,
            )
            lines = samples.kept_samples(self.folder, decoding, compared, compare_both)
            return Agreement.of(lines, temperature)


@dataclass(frozen=True)
class AgreementResult(samples.SampledTable):
    """Table of ``agreement_table`` with the dense model ``against``."""

    against: str


def run(
    options: AgreementOptions, reporter: progress.Reporter = progress.SILENT
) -> commands.Result:
    """Measure agreement and acceptance: ``reports/<name>/token-agreement.csv``, with tokens in ``runs/``."""
    subject = Subject.evaluated(options)
    check_pair(subject.source, options.dense)
    # Load both models and the prompts
    measured = subject.load(reporter, with_logits=False, tokens=TOKENS)
    length = measured.blocks.block_size
    new_tokens = options.new_tokens or length // 2
    if new_tokens >= length:
        raise errors.UserError(
            f"--new-tokens {new_tokens} leaves no prompt in a block of {length} tokens: give fewer"
        )
    model = samples.Checkpoint(subject.source, measured.model, measured.tokenizer, options.tau)
    dense = samples.Checkpoint.load(options, options.dense, None, reporter)
    micro_batch.check_positions(dense.model, length, "--context")
    check_vocabulary(model.model, dense.model)
    # Compare them in each decoding
    comparison = Comparison(
        model=model,
        dense=dense,
        blocks=measured.blocks,
        new_tokens=new_tokens,
        seed=options.seed,
        folder=options.folders.run_dir(subject.name) / "agreement",
        reporter=reporter,
    )
    results = {
        decoding: comparison.measure(decoding, temperature)
        for decoding, temperature in _TEMPERATURES.items()
    }
    # Write the table
    rows = agreement_table(results, DRAFT_TOKENS)
    record = {
        **model.origin,
        "against": dense.origin,
        "data": measured.text,
        "block_size": length,
        "new_tokens": new_tokens,
        "seed": options.seed,
    }
    folder = options.folders.report_dir(subject.name)
    distributed.on_main(lambda: AGREEMENT.write(folder, rows, record, reporter))
    result = AgreementResult(subject.name, rows, folder, comparison.folder, options.dense)
    return commands.Result(result, show)


def check_vocabulary(model: PreTrainedModel, dense: PreTrainedModel) -> None:
    """Raise ``UserError`` unless both models predict distributions over equally many tokens."""
    num_tokens = model_shape.vocabulary_size(model)
    num_dense_tokens = model_shape.vocabulary_size(dense)
    if num_tokens != num_dense_tokens:
        raise errors.UserError(
            f"the model predicts {num_tokens} tokens and the dense model {num_dense_tokens} "
            "(vocab_size), so their distributions differ in length\n"
            "compare models of equal vocab_size"
        )


def show(result: AgreementResult) -> None:
    """Print agreement and acceptance, and the tokens per pass of the dense model at each number of drafted tokens."""
    rows = result.rows
    name = console.escape(result.name)
    dense = console.escape(result.against)
    # Print the agreement of greedy decoding, and the acceptance of sampling
    greedy = rows[rows["decoding"] == GREEDY].iloc[0]
    sampled = rows[rows["decoding"] == SAMPLED].iloc[0]
    agreement = samples.with_error(greedy["agreement"], greedy["agreement_standard_error"])
    number = f"{greedy['num_tokens']:,} greedy tokens"
    console.out.print(f"[bold]{name}[/bold]: agreement with {dense} {agreement} over {number}")
    acceptance = samples.with_error(sampled["acceptance"], sampled["acceptance_standard_error"])
    number = f"{sampled['num_tokens']:,} tokens sampled at temperature {sampled['temperature']:g}"
    console.out.print(f"acceptance as a draft model {acceptance} over {number}")
    # Print the tokens per pass, by number of drafted tokens
    grid = console.Table(
        "drafted tokens", *rows["decoding"].unique(), title=f"tokens per pass of {dense}"
    )
    for number, group in rows.groupby("draft_tokens"):
        values = [
            f"{row.tokens_per_pass:.2f} ± {row.tokens_per_pass_standard_error:.2f}"
            for row in group.itertuples()
        ]
        grid.add_row(str(number), *values)
    console.out.print(grid)
    samples.say_sample_count(rows["num_documents"], "documents")
    console.print_path("values", result.folder / "token-agreement.csv")
    console.print_path("continuations and values by token", result.samples)
