"""Variable tracking: find the variables that have a value, where each is assigned from the one before.

As in RULER: one chain of five variables of five letters (four hops), each assigned on a line between lines of noise, 30
new tokens, and a worked example with names of three letters. Different from RULER: the wording, assignments at
independent uniform depths, and no example where it does not fit.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random

from spkv_nas.data.ruler import haystacks, material, sample, words

NEW_TOKENS = 30
_LETTERS, _EXAMPLE_LETTERS, _EXAMPLE_SENTENCES, _MIN_SENTENCES = 5, 3, 10, 10


@dataclass(frozen=True)
class VariableTracking:
    """Task with one assignment from a number, and ``num_hops`` assignments from another variable."""

    num_hops: int = 4

    def generate(self, request: sample.Request, _material: material.Material) -> sample.Sample:
        """Generate a sample."""
        rng = request.rng
        # Write the worked example
        render_example, example_prefix, example_names = self._problem(rng, _EXAMPLE_LETTERS)
        example = f"{render_example(_EXAMPLE_SENTENCES)}\n{example_prefix} {', '.join(example_names)}\n\n"
        render, prefix, names = self._problem(rng, _LETTERS)

        def make(leading_text: str) -> sample.Sample:
            def render_all(number: int) -> str:
                return f"{leading_text}{render(number)}"

            return sample.fill(request, render_all, prefix, names, new_tokens=NEW_TOKENS, least=_MIN_SENTENCES)

        # Leave the example out if the sample does not fit with it
        return sample.first_fitting(partial(make, leading_text) for leading_text in (example, ""))

    def _problem(self, rng: Random, length: int) -> tuple[Callable[[int], str], str, list[str]]:
        """Create a chain of names of ``length`` letters: (prompt by number of noise sentences, prefix, answers)."""
        seen: set[str] = set()
        draw = partial(words.letters, rng, length, string.ascii_uppercase)
        # Assign a number to the first variable, and each variable to the next
        names = [words.new(draw, seen) for _ in range(self.num_hops + 1)]
        value = rng.randint(10_000, 99_999)
        chain = [f"VAR {names[0]} = {value}.", *(f"VAR {target} = VAR {source}." for source, target in pairwise(names))]
        depths = sorted(rng.random() for _ in chain)

        def render(number: int) -> str:
            hidden = haystacks.hide(haystacks.noise(number), chain, depths)
            head = "Follow the variables that this text assigns, from a number or from each other."
            return f"{head}\n{hidden}\nQuestion: Which variables have the value {value}?"

        return render, f"Answer: The {len(names)} variables with the value {value} are", names
