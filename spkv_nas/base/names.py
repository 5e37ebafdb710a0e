"""Validate names of probes, layouts, reports and runs, from flags or others' files, before they become paths."""

from spkv_nas.base.errors import UserError

MAX_CHARACTERS = 100
MAX_BYTES = 180  # file systems allow 255; a run's folder adds hashes and a seed


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it is valid as the name of one file or folder; ``what`` says whose it is, for the error.

    Raises ``UserError``: the name is empty or too long, contains a separator or a control character, starts or ends
    with a blank, or starts with a dot, like ``..`` and hidden files.
    """
    reason = _reason_against(name)
    if reason is not None:
        raise UserError(f"{what} {name[:60]!r} cannot name a file: {reason}")
    return name


def _reason_against(name: str) -> str | None:
    """Return a clause on why a name is invalid; None if it is valid."""
    if not name or name != name.strip():
        return "it is empty, or begins or ends with a blank"
    num_bytes = len(name.encode("utf-8", "surrogatepass"))
    if len(name) > MAX_CHARACTERS or num_bytes > MAX_BYTES:
        return f"it has {len(name)} characters; at most {MAX_CHARACTERS} ({MAX_BYTES} bytes)"
    if name.startswith("."):
        return "it begins with a dot"
    for character in name:
        if character in "/\\" or not character.isprintable():
            return f"it holds {character!r}"
    return None
