"""Registry of the 13 tasks by RULER's names, and the function that generates their samples.

    generate("niah_single_1", seed=0, index=7, length=4096, tokenizer=tokenizer)

The same arguments give the same bytes in every process. ``index`` counts samples; another seed gives other samples.
"""

from typing import Protocol

from spkv_nas.base.errors import UserError
from spkv_nas.data.ruler import counting, needles, sample, tracking
from spkv_nas.data.ruler.answering import DocumentQuestions
from spkv_nas.data.ruler.material import HOTPOT, SQUAD, Material
from spkv_nas.data.tokenizer import Tokenizer


class Task(Protocol):
    """Generator of a task's samples."""

    def generate(self, request: sample.Request, _material: Material, /) -> sample.Sample:
        """Generate the requested sample."""


_QUESTIONS: dict[str, Task] = {SQUAD: DocumentQuestions("SQuAD"), HOTPOT: DocumentQuestions("HotpotQA")}
TASKS: dict[str, Task] = {
    "niah_single_1": needles.Needles("noise"),
    "niah_single_2": needles.Needles(),
    "niah_single_3": needles.Needles(value="uuid"),
    "niah_multikey_1": needles.Needles(num_keys=4),
    "niah_multikey_2": needles.Needles("needles"),
    "niah_multikey_3": needles.Needles("needles", key="uuid", value="uuid"),
    "niah_multivalue": needles.Needles(num_values=4),
    "niah_multiquery": needles.Needles(num_keys=4, num_queries=4),
    "vt": tracking.VariableTracking(),
    "cwe": counting.CommonWords(),
    "fwe": counting.FrequentWords(),
    **_QUESTIONS,
}
NO_MATERIAL = Material()


def available(material: Material) -> list[str]:
    """Return the tasks that can be generated: eleven, and those on documents for which there are questions."""
    return [task for task in TASKS if task not in _QUESTIONS or task in material.questions]


def check_task(task: str) -> None:
    """Raise ``UserError`` unless a task exists."""
    if task not in TASKS:
        raise UserError(f"unknown RULER task '{task}'; expected one of {', '.join(TASKS)}")


def accepts_any(task: str) -> bool:
    """Return True if any one of the answers suffices; other tasks score the share of answers."""
    return task in _QUESTIONS


def generate(
    task: str,
    seed: int,
    index: int,
    length: int,
    tokenizer: Tokenizer,
    material: Material = NO_MATERIAL,
    *,
    is_answered: bool = False,
) -> sample.Sample:
    """Generate sample ``index`` of a task, as ``Request`` describes it.

    Raises ``UserError`` if there is no such task, its documents are missing, or it does not fit in the length.
    """
    check_task(task)
    return TASKS[task].generate(sample.Request(task, seed, index, length, tokenizer, is_answered), material)
