"""Decide from Python whether layouts may replace a model in memory, with an error rate."""

from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spkv_nas.artifacts.head_scores import HeadScores
from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.progress import Progress, Reporter
from spkv_nas.data.blocks import TokenBlocks
from spkv_nas.evaluation import micro_batch, separators, zero_shot
from spkv_nas.evaluation.verdict.contenders import Contender, ScoreStore
from spkv_nas.evaluation.verdict.criterion import Setting
from spkv_nas.evaluation.verdict.margins import parse_margins, parse_risk
from spkv_nas.evaluation.verdict.trial import Trial, Verdict, decide_all, text_in_random_order


def verdict(
    model: PreTrainedModel,
    layouts: Layout | Sequence[Layout] | Mapping[str, Layout],
    blocks: TokenBlocks | Iterable[str],
    *,
    margin: str = "nll=1%",
    risk: float | str = 0.05,
    scores: HeadScores | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """Decide whether layouts lose less than a margin on the weights of ``model``, without retraining.

    Both are measured document by document, in random order, until the answer is known. That any layout passes wrongly,
    and that any fails wrongly, has a probability of at most ``risk`` each, however early it stops::

        result = spkv_nas.verdict(model, layouts, heldout, margin="nll=1%", scores=scores)
        result.answers  # {"densest": "passes", "uniform": "fails", "random-0": "open"}
        result.rows[["candidate", "loss", "low", "high", "num_samples"]]

    Args:
        model: any supported decoder; it is left unchanged.
        layouts: one layout, several, or several by name; without names each is called by its strategy.
        blocks: text on which no layout was selected, as token blocks or as strings.
        margin: largest loss allowed by criterion, with their options, as ``spkv-nas verdict --margin`` takes it.
        risk: largest probability of a wrong pass, and of a wrong failure: 0.05 or "5%".
        scores: head scores that the layouts were proposed from, whose documents are left out of the text.
        tokenizer: the model's tokenizer, for strings, and for criteria that generate text.
        max_tokens: tokens to use, spread over the documents; None: one block per document, at least 128 blocks.
        seed: random seed of the samples and their order.
        progress: called with what is done and the total.

    Raises ``UserError``: a layout does not fit the model, the margin or the risk is invalid, or no document is left.
    """
    trial = trial_in_memory(model, blocks, margin, scores=scores, tokenizer=tokenizer, max_tokens=max_tokens, seed=seed)
    candidates = [Contender(name, layout=layout) for name, layout in zero_shot.by_name(layouts).items()]
    return decide_all(trial, candidates, parse_risk(risk), Reporter.of(progress))


def trial_in_memory(
    model: PreTrainedModel,
    blocks: TokenBlocks | Iterable[str],
    margin: str,
    *,
    scores: HeadScores | None,
    tokenizer: PreTrainedTokenizerBase | None,
    max_tokens: int | None,
    seed: int,
) -> Trial:
    """Prepare the samples of every criterion for a model in memory; arguments as in ``verdict``."""
    # Parse the margins, and check what their criteria need
    margins = parse_margins(margin)
    for criterion, _ in margins:
        criterion.check()
    # Shuffle the text, without the documents that selected heads
    text = None
    if any(criterion.reads_text for criterion, _ in margins):
        whole = blocks if isinstance(blocks, TokenBlocks) else separators.text_blocks(model, blocks, tokenizer)
        micro_batch.check_blocks(model, whole)
        selected = frozenset() if scores is None or scores.selected_on is None else scores.selected_on
        text = text_in_random_order(whole, seed=seed, selected=selected, max_tokens=max_tokens)
    return Trial.of(margins, Setting(model, tokenizer, text, seed), ScoreStore(model))
