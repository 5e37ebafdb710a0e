"""Planning of the palindrome comparison, like ``training.run_plan`` for recipes."""

from __future__ import annotations

from pathlib import Path

from spkv_nas.base.device import choose_device
from spkv_nas.cost.memory import Training
from spkv_nas.training.palindrome.run import VARIANTS, PalindromeSettings, is_finished, new_model, variant_folder
from spkv_nas.training.palindrome.task import Palindromes
from spkv_nas.training.run_files import newest_step
from spkv_nas.training.run_plan import FINISHED, Plan, PlannedRun
from spkv_nas.training.step_cost import measure


def plan_palindrome(settings: PalindromeSettings, name: str, runs: Path, *, device: str | None = None) -> Plan:
    """Plan the training of all variants; ``runs`` is the folder of their checkpoints, which may not exist yet."""
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
        cost = measure(new_model(settings, variant), shape, training, device=choose_device(device))
        remaining = settings.steps - done
        state = f"goes on from step {done}" if done else ""
        tokens, seconds = remaining * shape[0] * shape[1], remaining * cost.seconds(settings.batch_size)
        planned.append(PlannedRun(variant, settings.steps, tokens, seconds, state))
    return Plan(name, tuple(planned))
