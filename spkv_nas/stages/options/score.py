"""Declare the options of the ``score`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass

from spkv_nas.artifacts import defaults
from spkv_nas.base.flag import default
from spkv_nas.stages import flags
from spkv_nas.stages.options import DENSE, DocumentOptions


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(DocumentOptions):
    """Score layouts without training, by a checkpoint's NLL with each of them. Writes reports/NAME/zero-shot.csv.

    The checkpoint may be dense or SP-KV. With --probe, the table includes the layouts' coverage. Finished scores are
    kept in runs/NAME/zero-shot/ and reused.
    """

    layouts: flags.OptionalLayoutFiles = default(None, "all of layouts/NAME/")
    model: flags.OptionalModel = DENSE
    probe: flags.OptionalProbe = default(note="Used to compute coverage.")
    max_tokens: flags.OptionalMaxTokens = default(None, f"{defaults.SCORE_TOKENS:,}")
    name: flags.Name = default(None, "the probe's or the model's")


def check(options: ScoreOptions) -> None:
    """Check the layouts, the model and the text."""
    from spkv_nas.stages.lookup import find_proposal, find_table
    from spkv_nas.stages.subject import Subject

    subject = Subject.of(options, DENSE, "score on")
    family = (
        subject.family if options.probe is None else find_table(options.folders, options.probe).name
    )
    find_proposal(options.folders, options.name or family, options.layouts)
    subject.check()
