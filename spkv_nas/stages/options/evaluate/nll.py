"""Declare the options of the ``evaluate nll`` command, and check them; the class's docstring is the help."""

from dataclasses import dataclass

from spkv_nas.base import errors, flag
from spkv_nas.evaluation.thresholds import parse_taus
from spkv_nas.stages import flags
from spkv_nas.stages.options import CheckpointOptions, DocumentOptions


@dataclass(frozen=True, kw_only=True)
class NLLOptions(CheckpointOptions, DocumentOptions):
    """Measure a checkpoint's NLL on held-out text, optionally against another checkpoint.

    The checkpoint may be dense, a hybrid, or have gates. Without --data, the text is the held-out standard library text
    of the embedded models. With --against, the difference between both checkpoints is paired by document and written
    to reports/NAME/evaluation.csv. With --taus, NLL and density of a checkpoint with gates at many thresholds are
    written to reports/NAME/tau-sweep.csv, with a figure. The tokens of --data are kept in runs/NAME/blocks/.
    """

    taus: flags.OptionalTaus = flag.default(note="Open gates are measured too, as the baseline.")


def check(options: NLLOptions) -> None:
    """Check the thresholds and the text."""
    from spkv_nas.stages.subject import Subject

    subject = Subject.evaluated(options)
    if options.taus is not None:
        parse_taus(options.taus)
        if options.tau is not None or options.against is not None:
            raise errors.UserError(
                "--taus compares thresholds of one checkpoint: remove --tau and --against"
            )
    subject.check()
