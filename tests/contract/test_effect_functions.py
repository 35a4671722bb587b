"""The SQL functions of effects agree with a model of one key, for any order of operations of the attempts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import namedtuple_row

pytestmark = pytest.mark.usefixtures("tables")

NUMBERS = count()
RUNS, STEPS = 4, 400
PAYLOADS = [b"a", b"a", b"a", b"a", b"a", b"b", None]
SCOPE = "blue\x1fmodel"
SET = "UPDATE pgfence_idempotency_key SET {} WHERE scope = %s AND key = %s"
PAST = "clock_timestamp() - interval '1 s'"
FINISH = "SELECT pgfence_finish_effect_v1(%s, %s, %s, 60, %s, %s, NULL, NULL, NULL, true)"
RENEW = "SELECT pgfence_renew_keys_v1(ARRAY[%s], ARRAY[%s], ARRAY[%s]::bigint[], ARRAY[30]::float8[])"


@dataclass(frozen=True)
class Row:
    """The model's view of a key's row."""

    status: str
    attempt: int
    claim: str
    payload: bytes | None
    good: bool = True
    """The claim is not over."""
    kept: bool = True
    """The record is not over."""
    steps: dict[str, int] = field(default_factory=dict)
    result: str | None = None


class Key:
    """The state machine of one key, whose attempts, current and former, send any statement at any time."""

    def __init__(self, admin: psycopg.Connection[Any], seed: int) -> None:
        self.admin = admin
        self.chance = Random(seed)
        self.key = f"k{next(NUMBERS)}"
        self.name = f"{SCOPE}\x1f{self.key}"
        self.row: Row | None = None
        self.claims: list[tuple[str, int]] = [(str(uuid4()), 1)]

    def ask(self, query: str, *values: object) -> Any:
        row = self.admin.execute(query.encode(), values).fetchone()
        return row[0] if row else None

    def mine(self) -> tuple[str, int, bool]:
        """Return one of the last claims, and whether its attempt is running."""
        claim, attempt = self.chance.choice(self.claims[-3:])
        return claim, attempt, self.row is not None and (self.row.claim, self.row.status) == (claim, "in_progress")

    def answer(self, attempt: int, *, stands: bool) -> int | None:
        """Return the expected result of a step or an end."""
        if stands:
            return attempt
        if self.row is None:
            return None
        return -1 if self.row.attempt == attempt else self.row.attempt

    def claim(self) -> None:
        payload, takeover = self.chance.choice(PAYLOADS), self.chance.random() < 0.5
        new, row = str(uuid4()), self.row
        expected = self.expected(payload, takeover)
        found = (
            self.admin.cursor(row_factory=namedtuple_row)
            .execute(
                "SELECT * FROM pgfence_claim_effect_v1(%s, %s, %s, %s, 30, 60, %s, 'me', 'here', 7)",
                [SCOPE, self.key, payload, new, takeover],
            )
            .fetchone()
        )
        assert found is not None
        assert found.outcome == expected
        if expected != "granted":
            assert row is not None
            assert found.attempt == row.attempt
            assert found.result == row.result
            return
        fresh = row is None or (not self.alive(row) and row.status in ("done", "failed"))
        attempt = 1 if row is None or fresh else row.attempt + 1
        steps = row.steps if row is not None and self.alive(row) else {}
        assert (found.attempt, json.loads(found.step or "{}")) == (attempt, steps)
        self.row = Row("in_progress", attempt, new, payload, steps=steps)
        self.claims.append((new, attempt))

    def alive(self, row: Row) -> bool:
        return row.kept or (row.status == "in_progress" and row.good)

    def expected(self, payload: bytes | None, takeover: bool) -> str:
        row = self.row
        if row is None or not self.alive(row):
            return "granted"
        if row.payload != payload:
            return "reused"
        if row.status in ("done", "failed"):
            return row.status
        if row.status == "in_progress" and row.good:
            return "busy"
        return "granted" if takeover or row.status == "free" else "lost"

    def save(self) -> None:
        step, value = self.chance.choice("ab"), self.chance.randrange(10)
        claim, attempt, stands = self.mine()
        answer = self.ask(
            "SELECT pgfence_save_step_v1(%s, %s, %s, %s, %s)", self.name, claim, attempt, step, str(value)
        )
        assert answer == self.answer(attempt, stands=stands)
        if stands and self.row is not None:
            self.row = replace(self.row, steps={step: value} | self.row.steps)

    def finish(self) -> None:
        status, value = self.chance.choice(["done", "failed"]), self.chance.randrange(10)
        claim, attempt, stands = self.mine()
        again = self.row is not None and self.row.claim == claim and self.row.status in ("done", "failed")
        answer = self.ask(FINISH, self.name, claim, attempt, status, str(value))
        assert answer == self.answer(attempt, stands=stands or again)
        if stands and self.row is not None:
            self.row = replace(self.row, status=status, result=str(value), kept=True)

    def look(self) -> None:
        claim, attempt, stands = self.mine()
        done = self.row is not None and self.row.claim == claim and self.row.status in ("done", "failed")
        answer = self.ask(FINISH, self.name, claim, attempt, None, None)
        assert answer == (0 if stands else self.answer(attempt, stands=done))

    def free(self) -> None:
        claim, attempt, stands = self.mine()
        answer = self.ask("SELECT pgfence_free_effect_v1(%s, %s, %s)", self.name, claim, attempt)
        assert answer == ("released" if stands else "superseded")
        if stands and self.row is not None:
            self.row = replace(self.row, status="free")

    def forget(self) -> None:
        claim, _, stands = self.mine()
        assert self.ask("SELECT pgfence_forget_effect_v1(%s, %s)", self.name, claim) is stands
        if stands and self.row is not None:
            self.row = replace(self.row, status="free")

    def renew(self) -> None:
        claim, attempt, stands = self.mine()
        told = json.loads(self.ask(RENEW, self.name, claim, attempt))[0]
        if self.row is None or self.row.claim != claim:
            assert told == ["lost", "superseded"]
        elif stands and not self.row.good:
            assert told == ["lost", "expired"]
        else:
            assert (told[0], told[2]) == ("ok", 30)
            if stands:
                self.row = replace(self.row, kept=True)

    def lapse(self) -> None:
        if self.row is not None and self.row.status == "in_progress":
            self.admin.execute(SET.format(f"locked_until = {PAST}").encode(), [SCOPE, self.key])
            self.row = replace(self.row, good=False)

    def expire(self) -> None:
        if self.row is not None:
            self.admin.execute(SET.format(f"expires_at = {PAST}").encode(), [SCOPE, self.key])
            self.row = replace(self.row, kept=False)

    def purge(self) -> None:
        if self.row is not None and not self.alive(self.row):
            self.admin.execute("DELETE FROM pgfence_idempotency_key WHERE scope = %s AND key = %s", [SCOPE, self.key])
            self.row = None

    def the_row_is_as_the_model_has_it(self) -> None:
        found = self.ask(
            "SELECT pg_catalog.to_jsonb(k) FROM pgfence_idempotency_key AS k WHERE scope = %s AND key = %s",
            SCOPE,
            self.key,
        )
        if self.row is None:
            assert found is None
            return
        row = self.row
        assert (found["status"], found["attempt"], UUID(found["claim_id"])) == (
            row.status,
            row.attempt,
            UUID(row.claim),
        )
        assert ((found["step"] or {}), found["result"]) == (row.steps, None if row.result is None else int(row.result))
        assert (found["locked_until"] is not None) == (row.status == "in_progress")


@pytest.mark.parametrize("seed", range(RUNS))
def test_whatever_attempts_do_the_row_follows_the_rules(admin: psycopg.Connection[Any], seed: int) -> None:
    """C100: however late attempts interfere, one result is stored, and only by the current attempt."""
    key = Key(admin, seed)
    acts = [key.claim] * 4 + [key.save, key.finish, key.look, key.free, key.forget, key.renew]
    acts += [key.lapse] * 2 + [key.expire, key.purge]
    for _ in range(STEPS):
        act = key.chance.choice(acts)
        act()
        key.the_row_is_as_the_model_has_it()


def test_a_row_that_is_locked_delays_no_other(admin: psycopg.Connection[Any], dsn: str) -> None:
    """The renewal of several claims returns "busy" for a locked row, and renews the others."""
    claims = [str(uuid4()) for _ in range(2)]
    keys = [f"l{next(NUMBERS)}-{claim}" for claim in claims]
    for key, claim in zip(keys, claims, strict=True):
        admin.execute("SELECT pgfence_claim_effect_v1('s', %s, NULL, %s, 30, 60, true, '', '', 1)", [key, claim])
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM pgfence_idempotency_key WHERE scope = 's' AND key = %s FOR UPDATE", [keys[0]])
        row = admin.execute(
            "SELECT pgfence_renew_keys_v1(%s, %s, '{1,1}', '{30,30}')", [[f"s\x1f{key}" for key in keys], claims]
        ).fetchone()
    assert row is not None
    assert [one[0] for one in json.loads(row[0])] == ["busy", "ok"]
