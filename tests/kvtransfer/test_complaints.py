"""A log has a ceiling: which complaints are said, and which are only counted."""

from kvtransfer.complaints import CHANGE_AFTER_S, MAX_SENDERS, REPEAT_AFTER_S, Complaints


def test_the_same_complaint_is_said_once_and_counted_from_then_on():
    complaints = Complaints()
    assert [complaints.is_news("w", "differs", float(second)) for second in range(5)] == [True] + [False] * 4
    assert complaints.num_unsaid == 4
    assert complaints.is_news("other", "differs", 5.0)


def test_it_is_news_again_after_long_and_after_all_was_well():
    complaints = Complaints()
    assert complaints.is_news("w", "differs", 0.0)
    assert not complaints.is_news("w", "differs", REPEAT_AFTER_S - 1)
    assert complaints.is_news("w", "differs", REPEAT_AFTER_S)
    complaints.settle("w")
    assert complaints.is_news("w", "differs", REPEAT_AFTER_S + 1)
    complaints.settle("nobody")


def test_a_change_is_news_but_not_every_message_of_one_that_keeps_changing():
    complaints = Complaints()
    said = [complaints.is_news("w", f"differs in {tenth}", tenth / 10) for tenth in range(1000)]
    assert sum(said) == 100 / CHANGE_AFTER_S
    assert complaints.num_unsaid == 990


def test_names_that_keep_changing_do_not_fill_the_log_or_the_memory():
    complaints = Complaints()
    said = [complaints.is_news(str(number), "malformed", number / 1000) for number in range(10 * MAX_SENDERS)]
    assert sum(said) == MAX_SENDERS
    assert len(complaints._said) == MAX_SENDERS
    assert complaints.is_news("late", "malformed", REPEAT_AFTER_S + 10)
