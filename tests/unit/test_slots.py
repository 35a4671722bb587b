"""Which slot is due, on any clock and through every change of it."""

from __future__ import annotations

import ast
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pgfence.once
from pgfence import Once
from pgfence.once._schedule import schedule_of, zone_of
from pgfence.once._slots import Ahead, Cron, Due, Every, Over, due
from support.rows import every_row

if TYPE_CHECKING:
    from pgfence.once._slots import CatchUp, Schedule

VIENNA = ZoneInfo("Europe/Vienna")
ZONES = [
    "UTC",
    "Europe/Vienna",
    "America/New_York",
    "America/Havana",  # goes back to midnight
    "America/Sao_Paulo",  # had days that began at one
    "Australia/Lord_Howe",  # shifts by half an hour
    "Asia/Kolkata",
    "Pacific/Apia",  # left out a day
    "Africa/Casablanca",
]
LINES = [
    "* * * * *",
    "*/7 * * * *",
    "30 2 * * *",
    "0,30 1-3 * * *",
    "15 */2 * * *",
    "0 0 * * *",
    "0 7 * * 1-5",
    "59 23 L * *",
]
STEPS = [timedelta(minutes=1), timedelta(minutes=90), timedelta(hours=6), timedelta(days=1), timedelta(days=7)]

schedules = st.one_of(
    st.builds(Cron, st.sampled_from(LINES), st.sampled_from(ZONES).map(zone_of)),
    st.builds(Every, st.sampled_from(STEPS), st.sampled_from(ZONES).map(zone_of)),
)


def changes() -> list[datetime]:
    """Instants shortly before the clocks of one of the zones were set, 2010 to 2027."""
    found = []
    for name in ZONES:
        zone, at = ZoneInfo(name), datetime(2010, 1, 1, tzinfo=UTC)
        while at.year < 2027:
            later = at + timedelta(hours=6)
            if at.astimezone(zone).utcoffset() != later.astimezone(zone).utcoffset():
                found.append(at)
            at = later
    return found


# Most moments near a change of the clocks, some anywhere.
moments = st.one_of(
    st.builds(
        lambda at, seconds, micro: at + timedelta(seconds=seconds, microseconds=micro),
        st.deferred(lambda: st.sampled_from(changes())),
        st.integers(-30 * 3600, 30 * 3600),
        st.integers(0, 999_999),
    ),
    st.datetimes(datetime(2005, 1, 1), datetime(2035, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
)


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type,misc]


def vienna(*parts: int, fold: int = 0) -> datetime:
    return datetime(*parts, tzinfo=VIENNA, fold=fold).astimezone(UTC)  # type: ignore[arg-type,misc]


# ---------------------------------------------------------------- properties


@given(schedules, moments)
def test_the_slot_has_begun_and_the_next_has_not(schedule: Schedule, now: datetime) -> None:
    """At any moment one slot counts: it has begun, and the one after it has not."""
    current = schedule.current(now)
    assert current <= now < schedule.after(current)


@given(schedules, moments, st.timedeltas(timedelta(0), timedelta(days=3)))
def test_slots_never_go_back(schedule: Schedule, now: datetime, later: timedelta) -> None:
    """As time passes the slot stays or advances, also while clocks are set back."""
    assert schedule.current(now) <= schedule.current(now + later)


@given(schedules, moments)
def test_a_slot_is_its_own_slot(schedule: Schedule, now: datetime) -> None:
    """All moments of a slot name it by the same instant, from its first microsecond to its last."""
    current = schedule.current(now)
    assert schedule.current(current) == current
    assert schedule.current(schedule.after(current) - timedelta(microseconds=1)) == current


@given(schedules, moments, st.sampled_from(ZONES))
def test_the_zone_of_now_does_not_matter(schedule: Schedule, now: datetime, zone: str) -> None:
    """A server or driver that reports its clock in another zone means the same instant."""
    assert schedule.current(now.astimezone(ZoneInfo(zone))) == schedule.current(now)


@given(schedules, moments, st.sampled_from(["none", "last", "all"]), st.integers(0, 5))
def test_what_is_done_is_never_due_again(schedule: Schedule, now: datetime, catch_up: CatchUp, more: int) -> None:
    """Once done, a slot and all before it are over, with every catch-up rule."""
    done = schedule.current(now)
    for _ in range(more):
        done = schedule.after(done)
    for at in (now - timedelta(days=1), now):
        assert isinstance(due(schedule, catch_up, at, done, done), Over | Ahead)


@given(schedules, moments, st.integers(1, 6))
def test_all_are_caught_up_in_order_and_once(schedule: Schedule, now: datetime, count: int) -> None:
    """With "all", every slot since the last one done comes up in its order, none twice, until none is left."""
    done = schedule.current(now)
    missed = [first := schedule.after(done)]
    missed += [first := schedule.after(first) for _ in range(count - 1)]
    seen = []
    while isinstance(found := due(schedule, "all", missed[-1], done, None), Due):
        done = found.slot
        seen.append(done)
    assert seen == missed


# ---------------------------------------------------------------- days and hours


def test_a_day_is_a_day_of_the_calendar() -> None:
    """Days begin at midnight there, be they of 23, 24 or 25 hours."""
    days = Every(timedelta(days=1), VIENNA)
    assert days.current(utc(2026, 3, 28, 12)) == vienna(2026, 3, 28)
    assert days.after(vienna(2026, 3, 29)) - vienna(2026, 3, 29) == timedelta(hours=23)
    assert days.after(vienna(2026, 10, 25)) - vienna(2026, 10, 25) == timedelta(hours=25)
    assert days.current(vienna(2026, 10, 25, 2, 30, fold=1)) == vienna(2026, 10, 25)


def test_weeks_begin_on_monday() -> None:
    """A slot of seven days begins on Monday."""
    weeks = Every(timedelta(days=7), VIENNA)
    assert weeks.current(vienna(2026, 11, 29, 23, 59)) == vienna(2026, 11, 23)
    assert weeks.after(vienna(2026, 11, 23)) == vienna(2026, 11, 30)


def test_a_day_that_a_calendar_left_out_is_no_slot() -> None:
    """Samoa skipped 30 December 2011, so the slot of the 29th is followed by that of the 31st."""
    apia = ZoneInfo("Pacific/Apia")
    days = Every(timedelta(days=1), apia)
    before = datetime(2011, 12, 29, tzinfo=apia).astimezone(UTC)
    assert days.after(before) == datetime(2011, 12, 31, tzinfo=apia).astimezone(UTC)


def test_hours_have_one_length_and_begin_on_the_hour() -> None:
    """Slots that are not whole days go by real time: on the day of 25 hours there are 25 of one hour."""
    hours = Every(timedelta(hours=1), ZoneInfo("Asia/Kolkata"))
    assert hours.current(utc(2026, 1, 1, 0, 45)) == utc(2026, 1, 1, 0, 30)
    hours = Every(timedelta(hours=1), VIENNA)
    slots = {hours.current(vienna(2026, 10, 25) + timedelta(minutes=15 * i)) for i in range(100)}
    assert len(slots) == 25


# ---------------------------------------------------------------- cron and summer time


@every_row(
    ("line", "day", "expected"),
    [
        # 2026-03-29: 02:00 to 03:00 is left out. 2026-10-25: 02:00 to 03:00 comes twice.
        ("30 2 * * *", (2026, 3, 29), [utc(2026, 3, 29, 1)]),
        ("0,30 2 * * *", (2026, 3, 29), [utc(2026, 3, 29, 1)]),
        ("30 2 * * *", (2026, 10, 25), [utc(2026, 10, 25, 0, 30)]),
        ("0 7 * * *", (2026, 3, 29), [utc(2026, 3, 29, 5)]),
        ("0 7 * * *", (2026, 3, 28), [utc(2026, 3, 28, 6)]),
        (
            "*/30 2 * * *",
            (2026, 10, 25),
            [utc(2026, 10, 25, 0), utc(2026, 10, 25, 0, 30), utc(2026, 10, 25, 1), utc(2026, 10, 25, 1, 30)],
        ),
    ],
)
def test_cron_lines_keep_cron_s_rules_for_summer_time(
    line: str, day: tuple[int, int, int], expected: list[datetime]
) -> None:
    """C088: what the clocks leave out begins when they have jumped, what they show twice begins once."""
    cron = Cron(line, VIENNA)
    slot, found = cron.current(vienna(*day) - timedelta(seconds=1)), []
    while (slot := cron.after(slot)) < vienna(*day) + timedelta(hours=23):
        found.append(slot)
    assert found == expected


def test_a_repeated_hour_belongs_to_the_slot_begun_first() -> None:
    """In the second 02:10 of the night, the slot of 02:30 has begun already and counts."""
    cron = Cron("30 2 * * *", VIENNA)
    assert cron.current(vienna(2026, 10, 25, 2, 10, fold=0)) == vienna(2026, 10, 24, 2, 30)
    assert cron.current(vienna(2026, 10, 25, 2, 10, fold=1)) == vienna(2026, 10, 25, 2, 30)


def test_a_skipped_midnight_is_not_a_slot_of_a_cron_line() -> None:
    """In Havana Sunday, 8 March 2026, begins at 01:00, which is not in the hour of 00."""
    havana = ZoneInfo("America/Havana")
    cron, saturday = Cron("* 23,0 1-31 * */5", havana), utc(2026, 3, 8, 4, 59)
    assert cron.after(saturday) == datetime(2026, 3, 8, 23, tzinfo=havana)
    assert cron.current(utc(2026, 3, 8, 5)) == cron.current(saturday)


def test_a_slot_is_exact_where_clocks_go_back_by_half_an_hour() -> None:
    """On Lord Howe Island 02:00 was 01:30 again on 5 April 2026; at 02:00:00.000000 the slot of 02:00 has begun."""
    cron = Cron("* 2 * * *", ZoneInfo("Australia/Lord_Howe"))
    assert cron.current(utc(2026, 4, 4, 15, 30)) == utc(2026, 4, 4, 15, 30)
    assert cron.current(utc(2026, 4, 4, 15, 29, 59)) == utc(2026, 4, 3, 15, 59)


def test_hosts_in_any_local_zone_name_the_same_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time zone of the host does not matter."""
    cron, now = Cron("0 7 * * *", VIENNA), utc(2026, 7, 1, 12)
    expected = cron.current(now)
    monkeypatch.setenv("TZ", "America/New_York")
    assert cron.current(now) == expected


def test_nothing_here_asks_the_clock_of_this_host() -> None:
    """C088: what time it is comes from the server alone; a host's own clock has no way in."""
    files = sorted(Path(pgfence.once.__file__).parent.glob("*.py"))
    calls = [call for path in files for call in ast.walk(ast.parse(path.read_text())) if isinstance(call, ast.Call)]
    asked = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    assert len(files) > 3
    assert asked & {"now", "utcnow", "today", "time_ns", "monotonic", "localtime", "gmtime", "clock"} == set()


# ---------------------------------------------------------------- what is due


DAYS = Every(timedelta(days=1), UTC)
TODAY, TOMORROW = utc(2026, 5, 4), utc(2026, 5, 5)
FOREVER = datetime.max.replace(tzinfo=UTC)


def test_a_missed_slot_is_run_late_by_default() -> None:
    """With "last" the newest slot can be started until the next one begins; older ones are skipped."""
    assert due(DAYS, "last", utc(2026, 5, 4, 23), utc(2026, 4, 1), None) == Due(TODAY, TOMORROW)


def test_a_missed_slot_is_left_out_where_nothing_is_caught_up() -> None:
    """With "none" a slot may be begun within its first minute, later it is missed."""
    assert due(DAYS, "none", utc(2026, 5, 4, 0, 0, 59), None, None) == Due(TODAY, utc(2026, 5, 4, 0, 1))
    assert due(DAYS, "none", utc(2026, 5, 4, 0, 1), None, None) == Over(TODAY, "missed", TOMORROW)


def test_the_first_slot_ever_has_no_past() -> None:
    """With "all" a name without a history begins with the slot that counts: it does not invent a backlog."""
    assert due(DAYS, "all", utc(2026, 5, 4, 5), None, None) == Due(TODAY, FOREVER)


def test_a_first_slot_that_died_is_not_forgotten() -> None:
    """With "all" what was begun and never finished comes first, also if nothing was ever done."""
    assert due(DAYS, "all", utc(2026, 5, 4, 5), None, utc(2026, 5, 2)) == Due(utc(2026, 5, 2), FOREVER)


def test_a_slot_that_the_caller_names_is_due_until_it_is_done() -> None:
    """With `at`, no clock decides which slot it is."""
    assert due(TOMORROW, "last", TODAY, None, None) == Due(TOMORROW, None)
    assert due(TOMORROW, "last", TODAY, TOMORROW, TOMORROW) == Over(TOMORROW, "done", None)


@every_row("catch_up", ["none", "last", "all"])
def test_a_slot_that_a_clock_ran_ahead_of_time_is_an_anomaly(catch_up: CatchUp) -> None:
    """After the server's clock was set back, a done slot that has not begun is distinguished from an ordinary done one."""
    assert due(DAYS, catch_up, TODAY, TOMORROW, TOMORROW) == Ahead(TOMORROW)
    assert due(DAYS, catch_up, TOMORROW, TOMORROW, TOMORROW) == Over(TOMORROW, "done", utc(2026, 5, 6))
    # Ahead by less than a slot, and set right before the next one: it is the same slot by both clocks.
    assert due(DAYS, catch_up, utc(2026, 5, 4, 5), TODAY, TODAY) == Over(TODAY, "done", TOMORROW)


def test_in_the_hour_that_comes_twice_what_is_done_is_not_ahead() -> None:
    """A driver that returns times in the session's zone shows 02:30 as done and 02:10 as now: the second one is later."""
    minutes = Every(timedelta(minutes=30), UTC)
    done, now = datetime(2026, 10, 25, 2, 30, tzinfo=VIENNA), datetime(2026, 10, 25, 2, 10, tzinfo=VIENNA, fold=1)
    assert due(minutes, "last", now, done, done) == Due(utc(2026, 10, 25, 1), utc(2026, 10, 25, 1, 30))
    assert due(minutes, "last", done, now, now) == Ahead(now.astimezone(UTC))


@every_row("catch_up", ["none", "last", "all"])
def test_a_slot_begun_by_a_wrong_clock_blocks_no_run(catch_up: CatchUp) -> None:
    """A slot begun ahead of time and never finished is ignored: the slot that is current by the clock now is due."""
    for done in (None, utc(2026, 5, 3)):
        found = due(DAYS, catch_up, TODAY, done, utc(2026, 6, 4))
        assert isinstance(found, Due)
        assert found.slot == TODAY


def test_a_slot_done_under_another_schedule_is_done() -> None:
    """A schedule that was changed names an earlier slot than the one done today: that is over, and no anomaly."""
    at_five = Cron("0 5 * * *", UTC)
    assert due(at_five, "last", utc(2026, 5, 4, 8), utc(2026, 5, 4, 7), None) == Over(
        utc(2026, 5, 4, 7), "done", utc(2026, 5, 5, 5)
    )


# ---------------------------------------------------------------- bad input


@every_row(
    ("given", "error", "says"),
    [
        ({}, TypeError, "one of every=.*cron=.* and at="),
        ({"every": timedelta(days=1), "cron": "* * * * *"}, TypeError, "one of every="),
        ({"every": 60}, TypeError, "timedelta"),
        ({"every": timedelta(0)}, ValueError, "millisecond"),
        ({"every": timedelta(days=-1)}, ValueError, "millisecond"),
        ({"cron": "61 * * * *"}, ValueError, "bad minute"),
        ({"cron": "daily"}, ValueError, "five fields"),
        ({"cron": "0 0 30 2 *"}, ValueError, "bad day-of-month"),
        ({"cron": "0 0 2 * * *"}, ValueError, "6 fields, not five"),
        ({"cron": "0 2 * *"}, ValueError, "4 fields, not five"),
        ({"cron": ""}, ValueError, "0 fields, not five"),
        ({"cron": "@reboot"}, ValueError, "a reboot concerns one host"),
        ({"cron": "@fortnightly"}, ValueError, "@hourly, @daily"),
        ({"cron": "@daily 5"}, ValueError, "@hourly, @daily"),
        ({"cron": 5}, TypeError, "cron must be a str"),
        ({"cron": "0 7 * * *", "tz": "Mars/Base"}, ValueError, "time zone"),
        ({"cron": "0 7 * * *", "tz": "../etc/passwd"}, ValueError, "time zone"),
        ({"cron": "0 7 * * *", "tz": None}, TypeError, "tz must be"),
        ({"cron": "0 7 * * *", "catch_up": "some"}, ValueError, "catch_up"),
        ({"at": "soon"}, ValueError, "ISO 8601"),
        ({"at": datetime(2026, 4, 1)}, ValueError, "no time zone"),  # noqa: DTZ001
        ({"at": 20260401}, TypeError, "datetime"),
    ],
)
def test_unusable_arguments_are_rejected_with_advice(given: dict[str, Any], error: type[Exception], says: str) -> None:
    """A wrong schedule is a typed error in the constructor, not at its first run."""
    arguments: dict[str, Any] = {"every": None, "cron": None, "at": None, "tz": "UTC", "catch_up": "last"}
    with pytest.raises(error, match=says):
        schedule_of(**arguments | given)


def test_a_name_that_is_too_long_with_its_slot_is_rejected() -> None:
    """The slot of `at=` belongs to the stored name, so the constructor counts it."""
    with pytest.raises(ValueError, match="including its slot, must not be longer than 255 .* but has 256"):
        Once(lambda: None, "a" * 230, at="2026-04-30")  # type: ignore[arg-type, return-value]


@every_row(
    ("nickname", "line"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
        (" @Daily ", "0 0 * * *"),
        (" 0\t7  * * 1-5 ", "0 7 * * 1-5"),
    ],
)
def test_a_crontab_s_nicknames_stand_for_their_lines(nickname: str, line: str) -> None:
    """Each nickname of crontab(5) that is a time is the line that the manual gives for it."""
    assert schedule_of(None, nickname, None, "Europe/Vienna", "last") == Cron(line, VIENNA)


def test_a_text_without_a_zone_is_utc() -> None:
    """The text of a date is an identity: the same instant on each host."""
    assert schedule_of(None, None, "2026-04-01", "UTC", "last") == utc(2026, 4, 1)
    assert schedule_of(None, None, "2026-04-01T02:00+02:00", "UTC", "last") == utc(2026, 4, 1)
