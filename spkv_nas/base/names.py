"""Names that become parts of paths: of probes, layouts, reports and runs.

They come from flags and from files of other people, so each is checked here before a path is made of it.
"""

from __future__ import annotations

from spkv_nas.base.errors import UserError

MOST_CHARACTERS, MOST_BYTES = 100, 180  # file systems take 255 bytes; a run's folder adds hashes and a seed


def check_name(name: str, what: str) -> str:
    """``name``, which can be the name of one file or folder below another.

    Args:
        what: says in the error whose name it is ("strategy", "probe").

    Raises:
        UserError: empty, too long, with a separator, a control character or a blank at an end, or beginning with a
            dot, as ``..`` and hidden files do.
    """
    reason = _unfit(name)
    if reason is not None:
        raise UserError(f"{what} {name[:60]!r} cannot name a file: {reason}")
    return name


def _unfit(name: str) -> str | None:
    if not name or name != name.strip():
        return "it is empty, or begins or ends with a blank"
    if len(name) > MOST_CHARACTERS or len(name.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        return f"it has {len(name)} characters; at most {MOST_CHARACTERS} ({MOST_BYTES} bytes)"
    if name.startswith("."):
        return "it begins with a dot"
    wrong = next((one for one in name if one in "/\\" or not one.isprintable()), None)
    return None if wrong is None else f"it holds {wrong!r}"
