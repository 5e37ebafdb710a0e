"""Check the options of a command before its stage, and with it torch, is imported: a mistake is named in a second.

The command line calls ``check`` first. Each class of options has one function here, those of its base classes come
before it. It checks values, options that exclude each other, and the files that are named, but not what takes a model,
a tokenizer or the content of a text. Nothing here may import torch (``tests/test_checks.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from spkv_nas.artifacts import signals
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.assets import EMBEDDED
from spkv_nas.base.device import check_device, check_dtype
from spkv_nas.base.errors import UserError
from spkv_nas.base.names import check_name
from spkv_nas.base.replace import check_new
from spkv_nas.base.units import parse_context
from spkv_nas.cost.formulas import visible_keys
from spkv_nas.cost.ladder import find_level
from spkv_nas.cost.roofline import find_hardware
from spkv_nas.data.config import SourceConfig
from spkv_nas.data.readers import open_source
from spkv_nas.data.ruler.tasks import check_task
from spkv_nas.evaluation.baselines.choices import parse_densities, parse_methods, parse_sinks
from spkv_nas.evaluation.thresholds import check_sweep, check_tau
from spkv_nas.model.source import check_checkpoint, check_config
from spkv_nas.stages import layout_options, options
from spkv_nas.stages.chosen import chosen_recipe, chosen_table
from spkv_nas.stages.common import Subject, find_proposal, find_table
from spkv_nas.stages.eval_modes import check_mode
from spkv_nas.training.ablation_plan import AblationPlan
from spkv_nas.training.recipe import Recipe

_WRITING = (
    options.ProbeOptions, options.EvaluateOptions, options.ScoreOptions, options.BaselinesOptions,
    options.SearchOptions, options.TrainOptions, options.TrainHybridOptions, options.AblateOptions,
    options.PalindromeOptions, options.CalibrateOptions, options.DemoOptions,
)  # fmt: skip


def check(given: object) -> None:
    """Check the options of a command.

    Args:
        given: a dataclass of ``stages.options`` or ``stages.layout_options``.

    Raises:
        UserError: naming the option or the file that is wrong.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the stage reads the same files, and warns
        for kind in reversed(type(given).__mro__):
            if kind in _CHECKS:
                _CHECKS[kind](given)
    if isinstance(given, _WRITING) and not getattr(given, "dry_run", False):
        given.place.check_writable()


def check_recipe(file: Path, dtype: str | None = None, *, needs_text: bool = True) -> Recipe:
    """Read a recipe, and look whether the files that it names are there.

    Args:
        dtype: precision in place of the recipe's.
        needs_text: whether its text is read.

    Raises:
        UserError: naming the key or the file.
    """
    recipe = Recipe.read(file).with_precision(dtype)
    _check_files(recipe, file.parent, needs_text=needs_text)
    return recipe


def _check_files(recipe: Recipe, base: Path, *, needs_text: bool = True) -> None:
    if recipe.model.path is not None:
        check_checkpoint(recipe.model.path)
    if recipe.gates.start_from is not None:
        check_checkpoint(recipe.gates.start_from)
    haystack = [] if recipe.data.mix is None else recipe.data.mix.ruler.haystack
    if needs_text:
        _check_text([*recipe.data.sources, *haystack], base)


def _check_text(sources: Iterable[str | SourceConfig], base: Path = Path()) -> None:
    for source in sources:
        open_source(source, base)


def _in_workspace(given: options.InWorkspace) -> None:
    if (name := getattr(given, "name", None)) is not None:
        check_name(name, "the name")


def _on_device(given: options.OnDevice) -> None:
    check_device(given.device, spreads=isinstance(given, options.SubjectOptions))


def _in_dtype(given: options.InDtype) -> None:
    check_dtype(given.dtype)


def _probe(given: options.ProbeOptions) -> None:
    taken = ("tau", "window", "gain_tokens", "steps", "granularity", "max_heads", "budget", "num_layouts", "seed")
    signal = given.signal or (signals.DENSITY if given.recipe is not None else None)
    if signal is not None:  # else the model's config decides
        signals.check_options(signal, **{name: getattr(given, name) for name in taken})
    check_tau(given.tau)
    if given.recipe is None:
        Subject.of_command(given).check()
    elif given.model is not None or given.data:
        raise UserError("give a recipe, or --model with --data, not both: a recipe says its own model and text")
    else:
        check_recipe(given.recipe)


def _evaluate(given: options.EvaluateOptions) -> None:
    check_mode(given)
    check_sweep(given.tau, given.tau_sweep, given.points)
    for source in (given.against, given.evaluator):
        if source is not None:
            check_checkpoint(source)
    if given.ruler is not None:
        for length in given.ruler.split(","):
            parse_context(length)
        for task in (given.ruler_tasks or "").split(",") if given.ruler_tasks is not None else ():
            check_task(task.strip())
        _check_text(given.haystack or ())
        _check_there(given.qa or (), "questions")
    elif given.tasks is not None:
        _check_there(given.include or (), "folder of tasks")
    else:
        subject = Subject.of_command(given)
        subject.check(in_blocks=not given.longppl)
        return
    check_checkpoint(str(given.model))


def _score(given: options.ScoreOptions) -> None:
    subject = Subject.of_command(given)
    family = subject.family if given.probe is None else find_table(given.place, given.probe).name
    find_proposal(given.place, given.name or family, given.layouts)
    subject.check()


def _baselines(given: options.BaselinesOptions) -> None:
    parse_methods(given.methods)
    parse_densities(given.densities)
    parse_sinks(given.sinks)
    check_sweep(given.tau, given.tau_sweep, given.points)
    if given.against is not None:
        check_checkpoint(given.against)
    elif given.tau is not None or given.tau_sweep is not None:
        raise UserError("--tau and --tau-sweep are those of --against: give an SP-KV checkpoint")
    Subject.of_command(given).check()


def _generate(given: options.GenerateOptions) -> None:
    if given.prompt is not None and given.file is not None:
        raise UserError("give a prompt or --file, not both")
    if given.prompt is None and given.file is None:
        raise UserError("give a prompt, or --file with one")
    if given.file is not None and str(given.file) != "-":
        _check_there([given.file], "prompt")
    check_tau(given.tau)
    check_checkpoint(given.model)


def _search(given: options.SearchOptions) -> None:
    from spkv_nas.stages.question import ask

    question = ask(given)
    _check_files(question.recipe, question.file.parent)


def _init(given: options.InitOptions) -> None:
    if given.out.exists() and not given.force:
        raise UserError(f"{given.out} is there already: give another --out, or --force to replace it")
    if given.steps is not None and given.minutes is not None:
        raise UserError("give --steps or --minutes, not both")
    check_checkpoint(given.model)
    _check_text(given.data)


def _plan(given: options.PlanOptions) -> None:
    if (given.recipe is None) == (given.model is None):
        raise UserError("give a recipe, or --model: a folder, an id or a config file")
    _check_sizes(given.context, given.hardware)
    if given.recipe is None:
        check_config(str(given.model))
        _check_text(given.data or ())
    elif given.data or given.block_size is not None or given.steps is not None:
        raise UserError("a recipe says its text, blocks and steps: leave --data, --block-size and --steps out")
    else:
        check_recipe(given.recipe, needs_text=given.tokens is None)


def _train(given: options.TrainOptions) -> None:
    check_recipe(given.recipe, given.dtype)


def _train_hybrid(given: options.TrainHybridOptions) -> None:
    table = chosen_table(given)
    find_proposal(given.place, table.name, given.layouts)
    check_recipe(chosen_recipe(given, table, "demo.yaml"), given.dtype)


def _ablate(given: options.AblateOptions) -> None:
    plan = AblationPlan.read(given.file or EMBEDDED / "ablations.yaml", given.dtype)
    for recipe in plan.recipes.values():
        _check_files(recipe, plan.base)


def _demo(given: options.DemoOptions) -> None:
    Recipe.read(EMBEDDED / "demo.yaml").with_precision(given.dtype)


def _report(given: options.ReportOptions) -> None:
    if given.figures not in (None, "paper"):
        raise UserError(f"--figures: expected paper; found '{given.figures}'")
    if given.probe is not None and not given.watch:
        find_table(given.place, given.probe)


def _check_sizes(context: str | None, hardware: str | None) -> int:
    """The context that is asked for, or any."""
    if hardware is not None:
        find_hardware(hardware)
    return 1 if context is None else parse_context(context)


def _check_sized(level: str | None, model: str | None) -> None:
    if level is not None and model is not None:
        raise UserError("give a level of the ladder or --model, not both")
    if level is not None:
        find_level(level)
    elif model is not None:
        check_config(model)


def _cost(given: options.CostOptions) -> None:
    _check_sized(given.level, given.model)
    tokens = _check_sizes(given.context, given.hardware)
    if given.density is not None:
        visible_keys(tokens, density=given.density, window=given.window)
    for file in given.layout or ():
        Layout.read(file)
    if given.calibration is not None and given.hardware is not None:
        raise UserError("give --calibration or --hardware, not both")


def _calibrate(given: options.CalibrateOptions) -> None:
    parse_context(given.context)
    check_dtype(given.dtype)
    if not given.train_step:
        return _check_sized(given.level, given.model)
    for name in ("context", "batch", "window", "dtype", "name"):
        if not _is_default(given, name):
            raise UserError(f"--train-step has its own batch and length, and writes nothing: leave --{name} out")
    if given.model is not None:
        raise UserError("--train-step times a level of the ladder, or on the CPU the embedded models: give a level")
    return _check_sized(given.level, None)


def _is_default(given: object, name: str) -> bool:
    return bool(getattr(given, name) == type(given).__dataclass_fields__[name].default)  # type: ignore[attr-defined]


def _export(given: layout_options.ExportOptions) -> None:
    if given.layout is not None:
        Layout.read(given.layout)
    check_new(given.out)
    check_checkpoint(given.model)


def _check_there(files: Iterable[str | Path], what: str) -> None:
    for file in files:
        if not Path(file).exists():
            raise UserError(f"{what} not found: {file}")


_CHECKS: dict[type, Callable[[Any], None]] = {
    options.InWorkspace: _in_workspace,
    options.OnDevice: _on_device,
    options.InDtype: _in_dtype,
    options.ProbeOptions: _probe,
    options.EvaluateOptions: _evaluate,
    options.ScoreOptions: _score,
    options.BaselinesOptions: _baselines,
    options.GenerateOptions: _generate,
    options.SearchOptions: _search,
    options.InitOptions: _init,
    options.PlanOptions: _plan,
    options.TrainOptions: _train,
    options.TrainHybridOptions: _train_hybrid,
    options.AblateOptions: _ablate,
    options.DemoOptions: _demo,
    options.ReportOptions: _report,
    options.CostOptions: _cost,
    options.CalibrateOptions: _calibrate,
    layout_options.ExportOptions: _export,
}
