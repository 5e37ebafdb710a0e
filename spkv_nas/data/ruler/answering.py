"""Question answering over documents, with the relevant documents hidden among others.

As in RULER: the question's own documents and others, first of its own article, in random order; 32 new tokens.
Different from RULER: the wording, and that a question whose documents are too long is replaced by another.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from random import Random

from spkv_nas.base.errors import UserError
from spkv_nas.data.ruler.material import Material, Question, Questions
from spkv_nas.data.ruler.sample import Request, Sample, fill, first_fitting

NEW_TOKENS = 32
_TRIES = 100  # maximum number of questions tried until one fits
_MIN_TOKENS = 16  # minimum tokens per document; bounds how many are drawn


@dataclass(frozen=True)
class DocumentQuestions:
    """One of the question answering tasks; ``form`` is the format of its file."""

    form: str

    def generate(self, request: Request, material: Material) -> Sample:
        """Generate a sample from the question at its index in a random order, or another if that one does not fit."""
        if request.task not in material.questions:
            raise UserError(f"RULER's task {request.task} needs documents: give --qa FILE.json in {self.form} format")
        questions = material.questions[request.task]
        # Try the question at the sample's index first, then random ones
        order = _order(len(questions.questions), request.seed)
        replacements = (request.rng.randrange(len(order)) for _ in range(_TRIES - 1))
        indices = chain((request.index % len(order),), replacements)
        return first_fitting(partial(self._ask, request, questions, questions.questions[order[i]]) for i in indices)

    def _ask(self, request: Request, questions: Questions, question: Question) -> Sample:
        rng, related = request.rng, {*question.documents, *question.related}
        # Choose documents: the question's own, then those of its article, then others
        akin = rng.sample(question.related, len(question.related))
        number = min(len(questions.documents), request.length // _MIN_TOKENS)
        unrelated = [index for index in rng.sample(range(len(questions.documents)), number) if index not in related]
        chosen = [*question.documents, *akin, *unrelated]
        order = rng.getrandbits(64)

        # Show the first ``number`` of them in random order
        def render(number: int) -> str:
            numbers = chosen[:number]
            Random(order).shuffle(numbers)
            texts = "\n\n".join(
                f"Document {position}:\n{questions.documents[index]}" for position, index in enumerate(numbers, 1)
            )
            return f"Answer the question from these documents, in a few words.\n\n{texts}\n\nQuestion: {question.text}"

        documents = {"least": len(question.documents), "most": len(chosen)}
        sample = fill(request, render, "Answer:", question.answers[:1], new_tokens=NEW_TOKENS, **documents)
        return replace(sample, answers=question.answers)


@cache
def _order(number: int, seed: int) -> tuple[int, ...]:
    return tuple(Random(f"{seed}/questions").sample(range(number), number))
