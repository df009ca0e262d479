"""A log has a ceiling: lines of a kind in a period, and one for those that were left out."""

from kvtransfer.line_budget import NUM_LINES, PERIOD_S, LineBudget


def test_few_lines_are_all_said():
    budget = LineBudget()
    assert all(budget.may_say("lost", float(second)) for second in range(NUM_LINES))
    assert budget.take_unsaid(PERIOD_S) == []
    assert budget._periods == {}


def test_what_is_too_much_is_counted_and_told_once_when_the_period_is_over():
    budget = LineBudget()
    said = [budget.may_say("lost", index / 1000) for index in range(1000)]
    assert said == [True] * NUM_LINES + [False] * (1000 - NUM_LINES)
    assert budget.take_unsaid(PERIOD_S - 0.1) == []
    assert not budget.may_say("lost", PERIOD_S - 0.1)
    assert budget.take_unsaid(PERIOD_S) == [("lost", 1001 - NUM_LINES)]
    assert budget.take_unsaid(PERIOD_S + 0.1) == []
    assert budget.may_say("lost", PERIOD_S + 0.1)


def test_a_kind_takes_nothing_from_another():
    budget = LineBudget()
    while budget.may_say("lost", 0.0):
        pass
    assert budget.may_say("failed", 1.0)
    assert budget.take_unsaid(PERIOD_S) == [("lost", 1)]
    assert budget.take_unsaid(PERIOD_S + 1.0) == []


def test_lines_in_an_hour_of_noise_have_a_ceiling():
    budget, num_lines = LineBudget(), 0
    for tenth in range(36000):
        num_lines += budget.may_say("lost", tenth / 10) + len(budget.take_unsaid(tenth / 10))
    assert num_lines <= (NUM_LINES + 1) * 3600 / PERIOD_S
