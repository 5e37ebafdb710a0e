"""Test the bisection for the smallest candidate that passes: what it finds, and the error rate of all its looks."""

from __future__ import annotations

import numpy as np
import pytest
from marks import slow_after

from spkv_nas.evaluation.verdict.criteria import DocumentNLLs
from spkv_nas.evaluation.verdict.critical_budget import Critical, Expected, critical
from spkv_nas.evaluation.verdict.trial import Answer

LETTERS: dict[str, Answer] = {"F": "fails", "o": "open", "P": "passes"}


def find(answers: str, first: int | None = None) -> Critical:
    """Bisect candidates with these answers, one letter each."""
    return critical(len(answers), 0.05, lambda position, level: LETTERS[answers[position]], first)


@pytest.mark.parametrize("number", [1, 2, 7, 37, 64])
def test_every_place_is_found_with_few_looks(number: int) -> None:
    for first in range(number + 1):
        result = find("F" * first + "P" * (number - first))
        assert result.passes == (first if first < number else None)
        assert result.fails == (first - 1 if first else None)
        assert len(result.looks) <= number.bit_length() + 1


@pytest.mark.parametrize("start", [0, 5, 14])
def test_from_a_first_look_near_the_answer_few_others_follow(start: int) -> None:
    for smallest in range(16):
        result = find("F" * smallest + "P" * (15 - smallest), start)
        assert result.looks[0].position == start
        assert result.passes == (smallest if smallest < 15 else None)
        if abs(smallest - start) <= 1:
            assert len(result.looks) <= 4


@pytest.mark.parametrize("start", [0, 3, 6, 8])
def test_every_measured_candidate_below_the_answer_that_fails_is_said_to(start: int) -> None:
    """From a first look on, a candidate that clearly fails was left open, as nobody tested the other side."""
    result = find("FFFFFFPPP", start)
    assert result.passes == 6
    assert {look.position for look in result.looks if look.position < 6} >= {4, 5}
    assert all(look.answer == "fails" and look.fails for look in result.looks if look.position < 6)
    assert result.fails == 5


def test_looking_for_failures_measures_nothing_more_where_one_passes() -> None:
    measured: list[int] = []

    def test(position: int, level: float) -> Answer:
        measured.append(position)
        return LETTERS["ooooooPoP"[position]]

    result = critical(9, 0.05, test, 4)
    assert result.passes == 6
    assert set(measured) == {look.position for look in result.looks if look.passes}
    assert not any(look.answer == "fails" for look in result.looks)


def test_open_candidates_are_between_the_answers() -> None:
    result = find("FFFFFFFooooooPPPPPPPPP")
    assert (result.fails, result.passes) == (6, 13)
    assert all(look.answer == "open" for look in result.looks if 6 < look.position < 13)


def test_all_or_none() -> None:
    assert (find("oooo").passes, find("oooo").fails) == (None, None)
    assert (find("FFFo").passes, find("FFFo").fails) == (None, 2)
    assert (find("PPPP").passes, find("PPPP").fails) == (0, None)


def test_a_smaller_candidate_that_passes_is_found_below_one_that_does_not() -> None:
    """Losses need not fall: the two candidates below the answer are tested."""
    result = find("FFFFPFP")
    assert result.passes == 4
    assert {look.position: look.answer for look in result.looks}[5] == "fails"


def test_a_look_has_the_level_of_its_depth() -> None:
    levels: dict[int, float] = {}

    def test(position: int, level: float) -> Answer:
        levels.setdefault(position, level)
        return "passes"

    critical(15, 0.08, test)
    assert levels == pytest.approx({7: 0.04, 3: 0.02, 1: 0.01, 0: 0.005})


def test_a_candidate_gets_no_answer_that_its_bisection_does_not_ask_for() -> None:
    """Above an open candidate, only passing is looked for."""
    result = find("FFFoFFF")
    assert {look.position: look.answer for look in result.looks} == {
        3: "open",
        5: "open",
        6: "open",
        1: "fails",
        2: "fails",
    }
    assert result.fails == 2


def test_a_look_has_levels_of_the_answers_that_were_asked_for() -> None:
    """Below an open candidate only failing is looked for, so that one that passes there is no more than open."""
    looks = {look.position: look for look in find("PPPPPoooPPPPPPP").looks}
    assert {position for position, look in looks.items() if look.passes} == {11, 9, 8, 7, 6}
    assert {position for position, look in looks.items() if look.fails} == {7, 3, 1, 0}
    assert all((look.answer == "passes") == (look.position >= 8) for look in looks.values())


def draw(random: np.random.Generator, kind: str, number: int) -> np.ndarray:
    """Return p-values of true hypotheses: independent, all equal, or of candidates beside each other alike."""
    if kind == "independent":
        return random.random(number)
    if kind == "equal":
        return np.full(number, random.random())
    return np.repeat(random.random(number // 4 + 1), 4)[:number]


@pytest.mark.parametrize("runs", slow_after(1, [1_000, 4_000]))
@pytest.mark.parametrize("kind", ["independent", "equal", "alike"])
@pytest.mark.parametrize("order", ["none", "lower half", "every second", "upper half"])
@pytest.mark.parametrize("wanted", ["passes", "fails"])
def test_any_wrong_answer_is_rarer_than_the_risk(
    kind: str, order: str, wanted: Answer, runs: int
) -> None:
    """The error rate holds in any order of losses, and with any dependence of the tests.

    Where a wrong failure is looked for, half of the other candidates pass, so that both bisections look at several.
    """
    random, number, risk = np.random.default_rng(0), 37, 0.1
    positions = np.arange(number)
    is_true = {
        "none": np.zeros(number, bool),
        "lower half": positions < number // 2,  # the opposite of the usual order
        "every second": positions % 2 == 0,
        "upper half": positions >= number // 2,
    }[order]
    wrong = 0
    for run in range(runs):
        first = None if run % 2 else 5
        ruled_out = range(run % 3 * 9)
        p = np.where(is_true, random.random(number) ** 8, draw(random, kind, number))
        # p-values of the other answer, which is right where the wanted one is not
        others = random.random(number) ** 8

        def test(
            position: int, level: float, p: np.ndarray = p, others: np.ndarray = others
        ) -> Answer:
            if p[position] <= level:
                return wanted
            is_other = wanted == "fails" and not is_true[position] and others[position] <= level
            return "passes" if is_other else "open"

        wrong += any(
            look.answer == wanted and not is_true[look.position]
            for look in critical(number, risk, test, first, ruled_out.__contains__).looks
        )
    assert wrong / runs <= risk + 3 * (risk / runs) ** 0.5


def test_a_candidate_that_costs_rule_out_is_tested_only_on_the_way() -> None:
    """It is left out where only unordered losses could let it pass, and looked at where its neighbour passes."""
    answers = "FFFFFFPPPPPPPPP"

    def looked_at(ruled_out: range) -> set[int]:
        result = critical(
            len(answers),
            0.05,
            lambda position, level: LETTERS[answers[position]],
            7,
            ruled_out.__contains__,
        )
        assert result.passes == 6
        return {look.position for look in result.looks}

    assert looked_at(range(0)) == {7, 6, 5, 4}
    assert looked_at(range(5)) == {7, 6, 5}
    assert looked_at(range(7)) == {7, 6, 5}


@pytest.mark.parametrize(("loss", "number"), [(1.5, 9), (0.95, 8), (0.5, 3)])
def test_the_loss_of_a_budget_that_fails_corrects_the_costs_of_the_next(
    loss: float, number: int
) -> None:
    """Below a budget that failed by 1.5 % at a cost of 1 %, one was measured whose cost was 1.4 %."""
    costs = [4.0, 3.0, 2.6, 2.45, 2.2, 2.0, 1.6, 1.4, 1.0, 0.8]
    for position in range(9):
        pairs = {"nll": np.array([[100.0 + loss * costs[position + 1], 100.0]] * 32)}
        expected = Expected([(DocumentNLLs(), 1.0)], costs, {position + 1: pairs})
        assert expected.rules_out(position, {position + 1: "fails"}) == (position < number)
        assert expected.rules_out(position, {position + 1: "open"}) == (position < 3)
        unknown = Expected([(DocumentNLLs(), 1.0)], None, {position + 1: pairs})
        assert not unknown.rules_out(position, {position + 1: "fails"})
