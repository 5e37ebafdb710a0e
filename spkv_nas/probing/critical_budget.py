"""Find from Python how many of the heads with the highest scores have to be global."""

from collections.abc import Callable, Iterable
from functools import partial

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.progress import Progress, Reporter
from spkv_nas.cost.cache_cost import CONTEXT
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import separators
from spkv_nas.evaluation.verdict import contenders, criteria
from spkv_nas.evaluation.verdict.critical_budget import CriticalBudget, find_critical_budget
from spkv_nas.evaluation.verdict.trial import Trial, trial_in_memory
from spkv_nas.probing import measure
from spkv_nas.probing.rivals import Rivals
from spkv_nas.proposal import budget, propose, requirements, windows


def critical_budget(
    model: PreTrainedModel,
    scores: HeadScores,
    blocks: TokenBlocks | Iterable[str],
    budgets: str,
    *,
    window: int | None = None,
    margin: str = "nll=1%",
    risk: float | str = 0.05,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> CriticalBudget:
    """Find the smallest budget of heads or memory whose layout loses less than a margin on the weights of ``model``.

    It bisects the budgets. That any budget passes wrongly, and that any fails wrongly, has a probability of at most
    ``risk`` each, for all of them together::

        result = spkv_nas.critical_budget(model, scores, heldout, "10%..75%", margin="nll=1%")
        result.passes, result.fails  # 25, 23: the critical budget, and the largest that fails below it
        spkv_nas.apply_layout(model, result.layout)

    Args:
        model: any supported decoder; it is left unchanged.
        scores: head scores, whose highest heads are global; their documents are left out of the text.
        blocks: text on which the heads were not scored, as token blocks or as strings.
        budgets: numbers or shares of global heads: a range such as "4..40" or "5%..50%", or a list; or for scores with
            costs of windows "memory", "memory=5%..50%" or "memory=10%,20%", shares of full attention's KV cache at the
            length of the blocks that the scores were measured on.
        window: tokens visible to local heads, the query's own included; by default the table's.
        margin: largest loss allowed by criterion, as in ``verdict``.
        risk: largest probability of a wrong pass, and of a wrong failure: 0.05 or "5%".
        tokenizer: the model's tokenizer, for strings, and for criteria that generate text.
        max_tokens: tokens to use, spread over the documents; None: one block per document, at least 128 blocks.
        seed: random seed of the samples and their order.
        progress: called with what is done and the total.

    Raises ``UserError``: the budgets, the margin or the risk are invalid, the scores do not fit the model, or no
    document is left.
    """
    prepare_trial = partial(
        trial_in_memory,
        model,
        blocks,
        margin,
        scores=scores,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        seed=seed,
    )
    if budgets.startswith(budget.MEMORY):
        probability = criteria.parse_risk(risk)
        return _by_memory(model, scores, budgets, window, probability, prepare_trial, progress)
    # One layout for each number of heads
    numbers = budget.parse_budgets(budgets, scores.num_candidates)
    layouts = [propose.densest_layout(scores, number, window=window) for number in numbers]
    return find_critical_budget(
        prepare_trial(), _contenders(layouts), criteria.parse_risk(risk), Reporter.of(progress)
    )


def _by_memory(
    model: PreTrainedModel,
    scores: HeadScores,
    budgets: str,
    window: int | None,
    risk: float,
    prepare_trial: Callable[..., Trial],
    progress: Progress | None,
) -> CriticalBudget:
    """Find the smallest memory whose layout passes, of those that lose least of several kinds; as above."""
    cost = requirements.Requirements(context=scores.record.measured_context or CONTEXT).cache_cost(
        scores, window
    )
    assert cost is not None  # there is a context
    by_memory = windows.layouts_by_memory(scores, cost, budget.parse_memories(budgets))
    trial = prepare_trial(with_contest=True)
    chooser = None
    if trial.contest is not None:
        chooser = Rivals(model, trial.contest, scores, cost, list(by_memory))
    return find_critical_budget(
        trial,
        _contenders(by_memory.values()),
        risk,
        Reporter.of(progress),
        list(by_memory),
        scores.record.nll,
        chooser=chooser,
    )


def _contenders(layouts: Iterable[Layout]) -> list[contenders.Contender]:
    """Return layouts as candidates of a trial, named by their positions."""
    return [
        contenders.Contender(str(number), layout=layout) for number, layout in enumerate(layouts)
    ]


def auto(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: TokenBlocks | Iterable[str],
    *,
    margin: str = "nll=1%",
    risk: float | str = 0.05,
    memory: str | None = None,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> CriticalBudget:
    """Find the smallest KV cache with which ``model`` loses less than a margin, with a window for every head.

    It measures costs of windows on half of the text at most, and bisects layouts for several memory budgets on the
    other documents, as the command ``auto`` does::

        result = spkv_nas.auto(model, tokenizer, texts, margin="nll=1%")
        result.passes, result.layout  # 12.0 (% of full attention's KV cache) and its layout; None if no budget passes

    Args:
        model: any supported decoder; it is left unchanged.
        tokenizer: the model's tokenizer.
        texts: documents, as strings or as token blocks.
        margin: largest loss allowed by criterion, as in ``verdict``.
        risk: largest probability of a wrong pass, and of a wrong failure: 0.05 or "5%".
        memory: shares of full attention's KV cache to try: "20%", "10%..40%" or a list; by default 4 % to 75 %.
        max_tokens: tokens to compare on; None: one block per document, at least 128 blocks.
        progress: called with what is done and the total.

    Raises ``UserError``: the margin or a memory budget is invalid, or the text has too few documents.
    """
    if not isinstance(texts, TokenBlocks):
        texts = separators.text_blocks(model, texts, tokenizer)
    part = measure.half_of(texts, measure.cost_blocks(texts.block_size))
    scores = measure.measure_signal("window-costs", model, part, progress=progress)
    return critical_budget(
        model,
        scores,
        texts,
        budget.MEMORY if memory is None else f"{budget.MEMORY}={memory}",
        margin=margin,
        risk=risk,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        progress=progress,
    )
