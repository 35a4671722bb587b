"""How long a lease is trusted: rules about numbers, for every TTL and every delay."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgfence._leases import terms
from support.rows import every_row

TTLS = st.floats(min_value=terms.SHORTEST_TTL, max_value=terms.LONGEST_TTL)
INSTANTS = st.floats(min_value=0, max_value=1e9)
DELAYS = st.floats(min_value=0, max_value=1e6)


@given(sent=INSTANTS, ttl=TTLS, there=DELAYS, back=DELAYS)
def test_trust_ends_before_the_server_grants_the_lease_again(
    sent: float, ttl: float, there: float, back: float
) -> None:
    """C086: however long request and response take, the holder's deadline is a margin before the server's expiry."""
    expires = sent + there + ttl  # the server counts from when it decides
    assert terms.compute_deadline(sent, ttl, ttl) <= expires - terms.compute_margin(ttl) + 1e-6
    arrived = sent + there + back
    if arrived >= expires:
        assert terms.compute_deadline(sent, ttl, ttl) < arrived


@given(TTLS)
def test_two_renewals_may_fail_before_the_third_decides(ttl: float) -> None:
    """C082: three beats, each with time left, fit before the deadline of the grant before them."""
    assert 2 * terms.compute_interval(ttl) < terms.compute_deadline(0, ttl, ttl)
    assert 0 < terms.compute_margin(ttl) <= min(5, ttl / 10)


@given(pause=st.floats(0.2, 1e4), renewal=st.floats(0, 1e3))
def test_the_shortest_ttl_just_survives_a_pause_at_the_worst_moment(pause: float, renewal: float) -> None:
    """A pause that begins when a renewal is due ends before the deadline, and with a shorter TTL after it."""
    for share, survives in ((1.001, True), (0.999, False)):
        ttl = terms.compute_shortest_ttl(pause, renewal) * share
        answered = terms.compute_interval(ttl) + pause + renewal
        assert (answered < terms.compute_deadline(0, ttl, ttl)) == survives


@given(st.integers(min_value=1, max_value=100), TTLS)
def test_a_retry_comes_soon_and_never_at_once(failures: int, ttl: float) -> None:
    """C082: the pause grows, and is never longer than a tenth of the TTL or a second: many tries fit before the deadline."""
    pause = terms.retry_after(failures, ttl)
    assert 0 < pause <= min(ttl / 10, 1)
    assert pause >= min(ttl / 10, terms.FIRST_RETRY * 2) / 2


@given(outage=st.floats(0.2, 1e4), failures=st.integers(min_value=1, max_value=100))
def test_a_lease_survives_an_outage_that_begins_before_a_renewal(outage: float, failures: int) -> None:
    """A TTL of 1.8 times the outage and the longest pause between retries suffices in the worst case, as the docs promise."""
    ttl = 1.8 * (outage + 1)
    renewed = terms.compute_interval(ttl) + outage + terms.retry_after(failures, ttl)
    assert renewed < terms.compute_deadline(0, ttl, ttl)


@given(st.floats(min_value=0, max_value=1e6))
def test_a_renewal_that_hangs_leaves_time_for_another(left: float) -> None:
    """C082: if at least a second is left, a statement gets half of it, and never more than is left."""
    patience = terms.compute_statement_budget(left)
    assert 0 <= patience <= left
    assert patience <= terms.LONGEST_STATEMENT
    if left >= 1:
        assert patience <= left / 2


@given(ttl=TTLS, share=st.floats(min_value=0, max_value=1), delay=st.floats(min_value=0, max_value=1e6))
def test_terms_that_go_together_are_taken_as_they_are(ttl: float, share: float, delay: float) -> None:
    """Values in range are returned in seconds, and the first grant is never longer than max_hold."""
    most = ttl / 2 + 1
    asked = terms.build_terms(
        ttl, max_hold=timedelta(seconds=most), min_hold=min(share * ttl, ttl / 2), lock_delay=delay
    )
    assert asked.ttl == ttl
    assert asked.max_hold == pytest.approx(most, abs=1e-6)
    assert asked.first == min(asked.ttl, asked.max_hold or math.inf)
    assert asked.lock_delay == delay


@every_row(
    ("values", "told"),
    [
        ({"ttl": 0}, "at least 0.3 s"),
        ({"ttl": -1}, "0 or more"),
        ({"ttl": 0.29}, "at least 0.3 s"),
        ({"ttl": math.nan}, "0 or more"),
        ({"ttl": math.inf}, "more than a day"),
        ({"ttl": 86_401}, "timedelta"),
        ({"ttl": timedelta(days=365 * 101)}, "hundred years"),
        ({"min_hold": 61}, "longer than ttl"),
        ({"min_hold": -1}, "0 or more"),
        ({"max_hold": 0}, "more than 0"),
        ({"max_hold": -1}, "0 or more"),
        ({"max_hold": 5, "min_hold": 6}, "longer than max_hold"),
        ({"max_hold": timedelta(days=365 * 101)}, "hundred years"),
        ({"lock_delay": math.inf}, "hundred years"),
        ({"lock_delay": -1}, "0 or more"),
    ],
)
def test_terms_out_of_range_are_rejected_with_advice(values: dict[str, Any], told: str) -> None:
    """Each raises a ValueError that says what is allowed."""
    with pytest.raises(ValueError, match=told):
        terms.build_terms(**{"ttl": 60, "max_hold": None, "min_hold": 0, "lock_delay": 0} | values)


@every_row("value", ["60", None, True, 1j])
def test_a_ttl_of_another_type_is_rejected(value: Any) -> None:
    """A str or a bool raises TypeError."""
    with pytest.raises(TypeError, match="ttl"):
        terms.ttl_of(value)


def test_a_ttl_above_a_day_is_taken_as_a_timedelta() -> None:
    """A TTL above a day is accepted as a timedelta; a number that large is more often a number of milliseconds."""
    assert terms.ttl_of(timedelta(days=2)) == 172_800
    assert terms.ttl_of(86_400) == 86_400


def test_a_max_hold_without_end_is_none() -> None:
    """`math.inf` and None have the same meaning."""
    assert terms.build_terms(60, max_hold=math.inf, min_hold=0, lock_delay=0).max_hold is None
