"""Questions on documents, those that have the answer among others.

As in RULER: the question's own documents and others, first of its own article, in random order; 32 new tokens. Our
own: the wording; and a question whose documents are too long makes way for another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from random import Random

from spkv_nas.base.errors import UserError
from spkv_nas.data.ruler.material import Material
from spkv_nas.data.ruler.questions import Question, Questions
from spkv_nas.data.ruler.sample import Request, Sample, fill, first_fitting

NEW_TOKENS = 32
_TRIES = 100  # questions, until one has room
_LEAST_TOKENS = 16  # of a document; bounds how many are drawn


@dataclass(frozen=True)
class DocumentQuestions:
    """One of the tasks; ``form`` is what its file is called."""

    form: str

    def generate(self, request: Request, material: Material) -> Sample:
        """A sample: the question of its index in a random order, or where that one has no room another."""
        if request.task not in material.questions:
            raise UserError(f"RULER's {request.task} needs documents: give --qa FILE.json in the form of {self.form}")
        given = material.questions[request.task]
        order = _order(len(given.questions), request.seed)
        others = (request.rng.randrange(len(order)) for _ in range(_TRIES - 1))
        places = chain((request.index % len(order),), others)
        return first_fitting(partial(self._ask, request, given, given.questions[order[place]]) for place in places)

    def _ask(self, request: Request, given: Questions, question: Question) -> Sample:
        rng, known = request.rng, {*question.own, *question.akin}
        akin = rng.sample(question.akin, len(question.akin))
        number = min(len(given.documents), request.length // _LEAST_TOKENS)
        others = [one for one in rng.sample(range(len(given.documents)), number) if one not in known]
        chosen = [*question.own, *akin, *others]
        order = rng.getrandbits(64)

        def render(number: int) -> str:
            numbers = chosen[:number]
            Random(order).shuffle(numbers)
            texts = "\n\n".join(f"Document {place}:\n{given.documents[one]}" for place, one in enumerate(numbers, 1))
            return f"Answer the question from these documents, in a few words.\n\n{texts}\n\nQuestion: {question.text}"

        made = fill(
            request, render, "Answer:", question.answers[:1], new_tokens=NEW_TOKENS, least=len(question.own),
            most=len(chosen),
        )  # fmt: skip
        return replace(made, answers=question.answers)


@cache
def _order(number: int, seed: int) -> tuple[int, ...]:
    """The numbers of all questions, shuffled."""
    return tuple(Random(f"{seed}/questions").sample(range(number), number))
