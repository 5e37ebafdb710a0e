"""Measure the agreement of a checkpoint's next tokens with a dense model's, to ``reports/<name>/``."""

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spkv_nas.artifacts.result_tables import AGREEMENT
from spkv_nas.base import console, distributed, errors, version
from spkv_nas.base.progress import SILENT, Reporter
from spkv_nas.contrib.defaults import AGREEMENT_TOKENS, DRAFT_TOKENS
from spkv_nas.contrib.evaluate import samples
from spkv_nas.contrib.evaluate.agreement.agreement import GREEDY, SAMPLED, Agreement, agreement_table, compare
from spkv_nas.contrib.evaluate.agreement.options import AgreementOptions
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import continuations, micro_batch
from spkv_nas.model import model_shape, transformers_logging
from spkv_nas.stages import checkpoints, checks
from spkv_nas.stages.result import Result

_TEMPERATURE = 1.0  # of sampled continuations


@dataclass(frozen=True)
class AgreementResult(samples.SampledTable):
    """Table of ``agreement_table`` with the dense model ``against``."""

    against: str


def agreement(options: AgreementOptions, reporter: Reporter = SILENT) -> AgreementResult:
    """Measure agreement and acceptance: ``reports/<name>/token-agreement.csv``, with tokens in ``runs/``."""
    transformers_logging.quiet_transformers(reporter)
    checks.check(options)
    subject = checkpoints.evaluated(options)
    checkpoints.check_pair(subject.source, options.dense)
    # Load both models and the prompts
    measured = subject.load(reporter, with_logits=False, tokens=AGREEMENT_TOKENS)
    length = measured.blocks.block_size
    new_tokens = options.new_tokens or length // 2
    if new_tokens >= length:
        raise errors.UserError(f"--new-tokens {new_tokens} leaves no prompt in a block of {length} tokens: give fewer")
    model = samples.Checkpoint(subject.source, measured.model, measured.tokenizer, options.tau)
    dense = samples.Checkpoint.load(options, options.dense, None, reporter)
    micro_batch.check_positions(dense.model, length, "--block-size")
    sizes = model_shape.vocabulary_size(model.model), model_shape.vocabulary_size(dense.model)
    if sizes[0] != sizes[1]:
        raise errors.UserError(
            f"the model predicts {sizes[0]} tokens and the dense model {sizes[1]} (vocab_size), so their distributions "
            "differ in length\ncompare models of equal vocab_size"
        )
    # Continue every prompt and compare the models
    sample_folder = options.folders.run_dir(subject.name) / "agreement"
    comparison = _Comparison(model, dense, measured.blocks, new_tokens, options.seed, sample_folder, reporter)
    results = {GREEDY: comparison.measure(GREEDY, 0.0), SAMPLED: comparison.measure(SAMPLED, _TEMPERATURE)}
    # Write the table
    rows = agreement_table(results, DRAFT_TOKENS)
    record = {
        **model.origin,
        "against": dense.origin,
        "data": measured.text,
        "block_size": length,
        "new_tokens": new_tokens,
        "seed": options.seed,
        "environment": version.environment(),
    }
    folder = options.folders.report_dir(subject.name)
    distributed.on_main(lambda: AGREEMENT.write(folder, rows, record, reporter))
    return AgreementResult(subject.name, rows, folder, sample_folder, options.dense)


@dataclass(frozen=True)
class _Comparison:
    """Comparison of two models on one text; finished continuations and comparisons are reused."""

    model: samples.Checkpoint
    dense: samples.Checkpoint
    blocks: TokenBlocks
    new_tokens: int
    seed: int
    folder: Path
    reporter: Reporter

    def measure(self, decoding: str, temperature: float) -> Agreement:
        """Measure one decoding of the dense model; must be called on all ranks."""
        model, dense, blocks = self.model, self.dense, self.blocks
        # Continue the prompts
        key = hashlib.sha256(blocks.tokens.tobytes()).hexdigest()
        seed = f" seed {self.seed}" if temperature else ""
        written_by = dense.identity(f"{key} {self.new_tokens} temperature {temperature}{seed}")
        with dense.hard(), self.reporter.bar(f"continuing, {decoding}") as progress:
            write = partial(continuations.write_continuations, dense.model, dense.tokenizer, blocks, self.new_tokens)
            texts = samples.kept_samples(
                samples.sample_file(self.folder, f"{decoding}-continuations", written_by),
                lambda: write(temperature=temperature, seed=self.seed, progress=progress),
            )
        # Compare the models on the continuations
        compared = model.identity(f"{model.origin['tau']} after {written_by}")
        with model.hard(), dense.hard(), self.reporter.bar(f"comparing, {decoding}") as progress:
            measure = partial(compare, model.model, dense.model, blocks, texts, self.new_tokens)
            lines = samples.kept_samples(
                samples.sample_file(self.folder, decoding, compared),
                lambda: measure(temperature=temperature, progress=progress),
            )
        return Agreement.of(lines, temperature)


def show(result: AgreementResult) -> None:
    """Print agreement and acceptance, and the tokens per pass of the dense model at each number of drafted tokens."""
    rows, dense = result.rows, console.escape(result.against)
    # Print the agreement of greedy decoding, and the acceptance of sampling
    for decoding, row in rows.drop_duplicates("decoding").set_index("decoding").iterrows():
        if decoding == GREEDY:
            agreement = samples.with_error(row["agreement"], row["agreement_standard_error"])
            number = f"{int(row['num_tokens']):,} greedy tokens"
            console.out.print(
                f"[bold]{console.escape(result.name)}[/bold]: agreement with {dense} {agreement} over {number}"
            )
        else:
            acceptance = samples.with_error(row["acceptance"], row["acceptance_standard_error"])
            console.out.print(
                f"acceptance as a draft model {acceptance} over {int(row['num_tokens']):,} tokens sampled at "
                f"temperature {row['temperature']:g}"
            )
    # Print the tokens per pass, by number of drafted tokens
    grid = console.Table("drafted tokens", *rows["decoding"].unique(), title=f"tokens per pass of {dense}")
    for number, group in rows.groupby("draft_tokens"):
        values = [f"{row.tokens_per_pass:.2f} ± {row.tokens_per_pass_standard_error:.2f}" for row in group.itertuples()]
        grid.add_row(str(number), *values)
    console.out.print(grid)
    samples.say_sample_count(rows["num_documents"], "documents")
    console.print_path("values", result.folder / "token-agreement.csv")
    console.print_path("continuations and values by token", result.samples)


def run(options: AgreementOptions, reporter: Reporter) -> Result:
    """Run the command."""
    return Result(agreement(options, reporter), show)
