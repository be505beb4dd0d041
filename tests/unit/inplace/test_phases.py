"""How long a rank took from one generation to the next, by its own clock."""

from __future__ import annotations

from memstore.core.wire.calls import RankLoss
from memstore.inplace.reentry import Leaving, in_place_of, met_text


def test_a_rank_that_stayed_measures_one_phase_after_the_other() -> None:
    """Its collective failed before a loss was known; what it waited for word of it is a part of the detection."""
    entered = in_place_of(4, (), Leaving(failed_s=10.0, over_s=10.5, end_s=10.75), 13.0, 13.25)
    assert (entered.detect_s, entered.abort_s, entered.replace_s, entered.meet_s) == (0.5, 0.25, 2.25, 0.25)


def test_a_rank_whose_waits_were_ended_by_the_loss_waited_for_no_word_of_it() -> None:
    """The exception came after the loss was known, or there was none because its function had returned."""
    assert Leaving(failed_s=11.0, over_s=10.0, end_s=12.0).detect_s == 0.0
    assert Leaving(failed_s=float("inf"), over_s=10.0, end_s=12.0).detect_s == 0.0


def test_a_new_process_was_in_no_generation_before() -> None:
    """It has nothing to tell of the loss."""
    entered = in_place_of(4, (), None, 13.0, 13.25)
    assert (entered.detect_s, entered.abort_s, entered.replace_s, entered.meet_s) == (None, None, None, 0.25)


def test_the_log_of_rank_0_says_who_was_replaced_and_why() -> None:
    """Losses that came before the generation that it left are of an earlier line."""
    losses = (RankLoss(3, 2, "ended", False, 0.0), RankLoss(1, 4, "frozen", False, 3.0))
    entered = in_place_of(4, losses, Leaving(10.0, 10.5, 10.75), 13.0, 13.25)
    text = "generation 4: rank 1 was replaced (its process was frozen); all met: detect 3.00 s, abort 0.25 s, replace "
    assert met_text(entered, 3) == f"{text}2.25 s, meet 0.25 s"
    assert met_text(entered, 1).startswith(
        "generation 4: ranks 1, 3 were replaced (its process ended, its process was frozen); all met: detect 0.50 s"
    )
