"""Read single files of Hugging Face Hub repositories, named as ``hub:ORG/NAME[@REVISION]``, and upload folders.

huggingface_hub is imported on use: it comes with the extra ``train``.
"""

import re
from pathlib import Path

from spkv_nas.base.errors import UserError, first_line
from spkv_nas.base.files import StrPath

PREFIX = "hub:"


def is_on_hub(path: StrPath) -> bool:
    """Return whether a path names a repository of the Hub rather than a file."""
    return str(path).startswith(PREFIX)


def local_file(path: StrPath, name: str, what: str) -> Path:
    """Return a path, or for ``hub:ORG/NAME[@REVISION]`` the file ``name`` of that repository, in the Hub's cache.

    It is downloaded unless the cache has it; offline only the cache is read. Raises ``UserError``, which starts with
    ``what`` is read: no such repository, revision or file, or the Hub cannot be reached.
    """
    if not is_on_hub(path):
        return Path(path)
    from huggingface_hub import errors, hf_hub_download

    repository, _, revision = str(path).removeprefix(PREFIX).partition("@")
    # Subclasses before their bases
    reasons: tuple[tuple[type[Exception], str], ...] = (
        (errors.HFValidationError, "it must be hub:ORG/NAME or hub:ORG/NAME@REVISION"),
        (
            errors.LocalEntryNotFoundError,
            "the Hub cannot be reached, and its cache on this machine has no copy",
        ),
        (
            errors.GatedRepoError,
            "access must be requested on the Hub; then log in with 'hf auth login'",
        ),
        (
            errors.RepositoryNotFoundError,
            "there is no such repository, or it is private: log in with 'hf auth login'",
        ),
        (errors.RevisionNotFoundError, f"the repository has no revision '{revision}'"),
        (errors.EntryNotFoundError, f"the repository has no file {name}"),
    )
    try:
        return Path(hf_hub_download(repository, name, revision=revision or None))
    except Exception as error:
        known = [reason for kind, reason in reasons if isinstance(error, kind)]
        reason = known[0] if known else first_line(error)
        raise UserError(f"cannot read {what} {path}: {reason}") from error


def check_repository(name: str) -> None:
    """Raise ``UserError`` if ``name`` is not ORG/NAME."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None:
        raise UserError(f"'{name}' is no repository of the Hub: expected ORG/NAME")


def push_folder(folder: Path, repository: str) -> str:
    """Upload a folder to a model repository, private if new; return its URL. ``UserError`` if the Hub refuses it."""
    from huggingface_hub import HfApi

    try:
        url = HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message="Upload a model with spkv-nas"
        )
    except Exception as error:
        raise UserError(
            f"cannot push to {repository}: {first_line(error)}\n"
            f"{folder} is complete; push it later with: hf upload {repository} {folder}"
        ) from error
    return str(url)
