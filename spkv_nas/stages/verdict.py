"""Decide whether candidates pass against a dense model, to ``reports/<name>/verdict.csv``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spkv_nas.artifacts.layout import Layout
from spkv_nas.artifacts.measurement import displacement_words, note_words
from spkv_nas.artifacts.proposal import layout_names
from spkv_nas.artifacts.result_tables import ALARM, VERDICT
from spkv_nas.base import console, progress
from spkv_nas.evaluation.verdict import criteria, trial, words
from spkv_nas.evaluation.verdict.contenders import Contender
from spkv_nas.model import checkpoint, config_section, source
from spkv_nas.stages import checks, commands, decision, printing, sized_model, subject
from spkv_nas.stages.options.verdict import VerdictOptions, is_layout


@dataclass(frozen=True)
class VerdictResult(trial.Verdict):
    """Verdict on what was compared, and the folder of its table."""

    compared: decision.Compared
    folder: Path


def run(options: VerdictOptions, reporter: progress.Reporter = progress.SILENT) -> commands.Result:
    """Measure candidates and the dense model until the answer about every candidate is known."""
    checks.check(options)
    # Check the candidates, then measure them
    candidates = contenders(options.candidates, options.model, reporter)
    for candidate in candidates:
        subject.check_pair(candidate.source, options.model)
    compared = decision.prepare(
        options, candidates, [Path(text) for text in options.candidates], reporter
    )
    outcome = trial.decide_all(
        compared.trial, candidates, criteria.parse_risk(options.risk), reporter
    )
    # Write the table
    record = {"answers": dict(outcome.answers), **decision.origin(options, compared)}
    record["by_position"] = decision.rounded_positions(outcome)
    record["notes"] = decision.recorded_notes(outcome)
    if outcome.alarm is not None:
        record[ALARM] = outcome.alarm
    folder = options.folders.report_dir(compared.name)
    VERDICT.write(folder, outcome.rows, record, reporter)
    result = VerdictResult(**vars(outcome), compared=compared, folder=folder)
    return commands.Result(result, show, document, exit_code=decision.EXIT_CODES[result.answer])


def contenders(texts: Sequence[str], dense: str, reporter: progress.Reporter) -> list[Contender]:
    """Return the candidates that files and checkpoints name, under different names (``layout_names``), each once."""
    # Read every candidate once
    candidates: dict[tuple[str, str], tuple[str, Contender]] = {}
    for text in texts:
        if is_layout(text):
            layout = Layout.read(text)
            candidate = Contender(layout.strategy, dense, layout, layout)
        else:
            config = checkpoint.read_config(str(source.resolve(text)), f"model {text}")
            candidate = Contender(
                sized_model.model_name(text), text, None, config_section.saved_layout(config)
            )
        first, _ = candidates.setdefault(candidate.content, (text, candidate))
        if first != text:
            reporter.announce(f"{text} is the same as {first}: measured once")
    # Make the names distinct: a candidate whose name is taken gets its path
    names = iter(
        layout_names(
            [(Path(text), each.layout) for text, each in candidates.values() if each.layout]
        )
    )
    named: list[Contender] = []
    for text, candidate in candidates.values():
        name = next(names) if candidate.layout else candidate.name
        named.append(
            replace(candidate, name=text if any(other.name == name for other in named) else name)
        )
    return named


def show(result: VerdictResult) -> None:
    """Print the table, the verdict on each candidate, and what it rests on."""
    printing.show_alarm(result.alarm)
    # Tabulate the criteria of each candidate
    compared = result.compared
    title = f"{console.escape(compared.name)}: loss against {console.escape(compared.against)}"
    columns = ("candidate", "global heads", "KV cache %", *decision.LOSS_COLUMNS, "result")
    grid = console.Table(*columns, title=title)
    layouts = {each.name: each.chosen for each in compared.candidates}
    for measured in decision.measured_by(compared, result):
        layout = layouts[measured.candidate]
        heads = "-" if layout is None else f"{layout.num_global} of {layout.num_heads}"
        if layout is not None and layout.windows:
            heads += f", {layout.reach}"
        memory = decision.percent(compared, measured.candidate)
        grid.add_row(
            console.escape(measured.candidate),
            heads,
            "-" if memory is None else f"{memory:.1f}",
            *decision.loss_cells(measured),
            measured.answer,
        )
    console.out.print(grid)
    # Print the conclusions
    for line in _sentences(result):
        console.out.print(line)
    console.print_path("verdict", result.folder / "verdict.csv")


def document(result: VerdictResult) -> dict[str, object]:
    """Return what ``--json`` prints: the answers, the table, and the sentences."""
    return {
        **decision.shared_document(result.compared, result, _sentences(result)),
        "alarm": result.alarm,
        "answer": result.answer,
        "answers": result.answers,
        "unrecorded": result.compared.selected.unknown,
        "folder": result.folder,
    }


def _sentences(result: VerdictResult) -> list[str]:
    """Return the verdict on each candidate, and what it rests on."""
    compared = result.compared
    selected = result.compared.selected
    sentences = []
    measured = decision.measured_by(compared, result)
    for name, answer in result.answers.items():
        measurements = [each for each in measured if each.candidate == name]
        verb, reason = words.conclusion(measurements, answer)
        sentences.append(f"[bold]{console.escape(name)} {verb}[/bold]: {console.escape(reason)}")
        details = [*displacement_words(measurements), *note_words(measurements)]
        sentences += [f"{console.escape(name)}: {console.escape(line)}" for line in details]
    shared = words.shared_by(len(result.answers))
    basis = words.basis(result.risk, shared, compared.num_left_out, selected.by, selected.unknown)
    return [*sentences, console.escape(basis)]
