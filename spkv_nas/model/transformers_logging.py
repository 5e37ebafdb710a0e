"""Choose what transformers prints while a command runs."""

from spkv_nas.base import distributed, progress


def quiet_transformers(reporter: progress.Reporter) -> None:
    """Silence the progress bars and log messages of transformers.

    A verbose reporter shows its info messages instead, on rank 0 only.
    """
    from transformers.utils import logging

    if distributed.process_index():
        logging.set_verbosity_error()
    elif reporter.verbose:
        logging.set_verbosity_info()
        return
    logging.disable_progress_bar()
