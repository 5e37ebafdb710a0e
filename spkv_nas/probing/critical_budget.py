"""Find from Python how many of the heads with the highest scores have to be global."""

from collections.abc import Iterable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.base.progress import Progress, Reporter
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation.verdict import contenders, margins
from spkv_nas.evaluation.verdict.critical_budget import CriticalBudget, find_critical_budget
from spkv_nas.evaluation.verdict.verdict import trial_in_memory
from spkv_nas.proposal import budget, propose


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
    """Find the smallest number of global heads whose layout loses less than a margin on the weights of ``model``.

    It bisects the budgets. That any budget passes wrongly, and that any fails wrongly, has a probability of at most
    ``risk`` each, for all of them together::

        result = spkv_nas.critical_budget(model, scores, heldout, "10%..75%", margin="nll=1%")
        result.passes, result.fails  # 25, 23: the critical budget, and the largest that fails below it
        spkv_nas.apply_layout(model, result.layout)

    Args:
        model: any supported decoder; it is left unchanged.
        scores: head scores, whose highest heads are global; their documents are left out of the text.
        blocks: text on which the heads were not scored, as token blocks or as strings.
        budgets: numbers or shares of global heads: a range such as "4..40" or "5%..50%", or a list.
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
    layouts = [
        propose.densest_layout(scores, number, window=window)
        for number in budget.parse_budgets(budgets, scores.num_candidates)
    ]
    trial = trial_in_memory(model, blocks, margin, scores=scores, tokenizer=tokenizer, max_tokens=max_tokens, seed=seed)
    candidates = [contenders.Contender(str(layout.num_global), layout=layout) for layout in layouts]
    return find_critical_budget(trial, candidates, margins.parse_risk(risk), Reporter.of(progress))
