"""Planning of the palindrome comparison, like ``training.run_plan`` for recipes."""

from __future__ import annotations

from spkv_nas.base.device import choose_device
from spkv_nas.base.progress import Reporter
from spkv_nas.contrib.reproduce.palindrome.options import NAME, PalindromeOptions
from spkv_nas.contrib.reproduce.palindrome.run import (
    VARIANTS,
    is_finished,
    new_model,
    variant_folder,
)
from spkv_nas.contrib.reproduce.palindrome.stage import palindrome_settings
from spkv_nas.contrib.reproduce.palindrome.task import Palindromes
from spkv_nas.cost.memory import Training
from spkv_nas.training.run_files import newest_step
from spkv_nas.training.run_plan import FINISHED, Plan, PlannedRun
from spkv_nas.training.step_cost import measure


def plan_palindrome(options: PalindromeOptions, reporter: Reporter) -> Plan:
    """Plan the training of all variants, some of which may be finished."""
    settings, name = palindrome_settings(options), options.name or NAME
    runs, device = options.folders.run_dir(name), choose_device(options.device)
    reporter.announce("timing a training step of each model")
    shape, training = (
        (settings.batch_size, Palindromes(0).length),
        Training(settings.steps, settings.batch_size, bfloat16=False),
    )
    planned = []
    for variant in VARIANTS:
        folder = variant_folder(settings, variant, runs)
        # Finished run
        if is_finished(folder):
            planned.append(PlannedRun(variant, settings.steps, 0, 0.0, FINISHED))
            continue
        # New or interrupted run
        done = newest_step(folder)
        cost = measure(new_model(settings, variant), shape, training, device=device)
        remaining = settings.steps - done
        state = f"goes on from step {done}" if done else ""
        tokens, seconds = remaining * shape[0] * shape[1], remaining * cost.seconds(settings.batch_size)
        planned.append(PlannedRun(variant, settings.steps, tokens, seconds, state))
    return Plan(name, tuple(planned))
