"""Say what an inference engine does with a form that ``export`` writes."""

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """Name what an engine does with a form."""

    EXACT = "exact"
    REFUSED = "refused"
    DENSE = "dense"
    DIFFERENT = "different"
    UNTRIED = "not tried"
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class Cell:
    """State what one engine does with one form."""

    # Exact: it computes the hybrid; refused: it stops with an error; dense, different: it computes something else
    # without an error; not checked: exact with other settings
    outcome: Outcome
    note: str = ""  # what that takes, such as an option of the engine
    is_read: bool = False  # whether it was read in the engine's source, and not run

    def __str__(self) -> str:
        """Return the outcome and its notes, such as "exact (with --model-impl transformers)"."""
        notes = [self.note] if self.note else []
        if self.is_read:
            notes.append("read, not run")
        if not notes:
            return self.outcome.value
        return f"{self.outcome.value} ({'; '.join(notes)})"
