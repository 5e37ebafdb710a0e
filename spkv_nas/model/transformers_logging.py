"""Choose what transformers prints while a command runs."""

from spkv_nas.base import distributed, progress


def quiet_transformers(reporter: progress.Reporter) -> None:
    """Silence transformers' progress bars and messages; a verbose reporter shows its info messages, on rank 0."""
    from transformers.utils import logging

    if distributed.process_index():
        logging.set_verbosity_error()
    elif reporter.verbose:
        logging.set_verbosity_info()
        return
    logging.disable_progress_bar()
