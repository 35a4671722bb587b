"""The requests to the server for partitions, and the arguments of `Partitions`, for the sync and async classes, without I/O."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from pgfence._api.inputs import check_text
from pgfence._holds.hold import format_names
from pgfence._leases.answers import is_row_locked
from pgfence._leases.json_text import encode_json
from pgfence._leases.request import Identity, LeaseRequest, Refused
from pgfence._sql.activity import build_lease_holder
from pgfence._sql.partitions import partition_sql
from pgfence._sql.storage import LIMITS
from pgfence.errors import LockTimeoutError
from pgfence.keys import LONGEST_STORED, qualify_name, unqualify_name
from pgfence.lease._engines import EngineSourceT
from pgfence.lease._request import HandleT, LeaseOptions
from pgfence.partitions._hashing import MOST_PARTITIONS, check_count, check_hash, compute_partition

if TYPE_CHECKING:
    from pgfence._leases.manager import LeaseManager
    from pgfence._process.clock import Seconds
    from pgfence._sql.params import ParamStyle, Row
    from pgfence._sql.storage import TableNames
    from pgfence.partitions._hashing import PartitionHash
    from pgfence.types import Holder

_LOOKS_LIKE_A_ROW = re.compile(r"[#/]\d+\Z")
_LONGEST_NAME = LONGEST_STORED - len(f"/{MOST_PARTITIONS}")
_RESIZING = 5.0
"""Seconds for which a resize is repeated if the server does not respond."""


@dataclass(frozen=True, kw_only=True)
class PartitionRequest(LeaseRequest):
    """The request for one partition. `stored` is the name of its row, and `group` the stored name of the set of partitions."""

    group: str
    number: int = 0
    count: int
    hash: PartitionHash

    kind = "partition"
    needed = LIMITS

    def choose(self, number: int) -> PartitionRequest:
        """Return the request for one of the partitions."""
        return replace(self, number=number, stored=f"{self.group}/{number}")

    def build_statement(self, style: ParamStyle, lease_id: str) -> tuple[str, tuple[object, ...]]:
        _, (name, _, *args) = super().build_statement(style, lease_id)
        text = partition_sql(self.place, style).acquire
        return text, (name, self.group, self.number, self.count, self.hash, *args)


class Membership(NamedTuple):
    """The server's response to a member. `rank` is how many of the live members joined before it."""

    members: int
    rank: int
    free: list[int]


class PartitionOptions(LeaseOptions[EngineSourceT, HandleT]):
    """The arguments of `Partitions`, and the requests that are built from them, for the sync and async classes."""

    def __init__(
        self,
        engine: EngineSourceT,
        name: str,
        count: int,
        *,
        hash: PartitionHash,  # noqa: A002  # the public name
        ttl: Seconds,
        namespace: str | None,
    ) -> None:
        super().__init__(engine, name, ttl=ttl, namespace=namespace)
        if _LOOKS_LIKE_A_ROW.search(name):
            raise ValueError(
                f'{name!r} cannot be the name of partitions, because it ends in "#" or "/" followed by digits, like the stored'
                " name of a permit or of a partition. Choose a name with a different ending"
            )
        self._qualify(namespace or "")
        self.count = check_count(count)
        self.hash: PartitionHash = check_hash(hash)

    def with_owner(self, owner: str | None, address: str | None) -> Self:
        """Return a copy of these options with the name of a worker that operators see and its address for routers."""
        told = None if address is None else {"address": check_text(address, "address")}
        other = copy(self)
        other._identity = Identity(
            None if owner is None else check_text(owner, "owner"), metadata=encode_json(told, "address")
        )
        other._request = None
        return other

    def choose_partition(self, key: object) -> int:
        return compute_partition(check_text(key, "key"), self.count, self.hash)

    def prepare(self) -> tuple[LeaseManager, PartitionRequest]:
        """Return the manager, and the request from which the requests for single partitions are built."""
        manager, request = self._prepare()
        assert isinstance(request, PartitionRequest)
        return manager, request

    def _create_request(self, place: TableNames, namespace: str) -> PartitionRequest:
        group = self._qualify(namespace)
        return PartitionRequest(
            stored=group,
            place=place,
            terms=self._terms,
            identity=self._identity,
            group=group,
            count=self.count,
            hash=self.hash,
        )

    def _qualify(self, namespace: str) -> str:
        return qualify_name(self._name, namespace, "the name of partitions", _LONGEST_NAME)

    async def join(self, member: str) -> Membership:
        """Become a member, or stay a member for another TTL."""
        manager, request = self.prepare()
        args = request.group, request.count, request.hash, member, request.terms.ttl
        text = partition_sql(request.place, manager.style).join
        outcome, count, hash_name, members, rank, free = await manager.fetch_row(
            request.place, text, args, needed=LIMITS
        )
        if outcome == "mismatch":
            raise Refused from self._build_mismatch_error(count, hash_name)
        return Membership(members, rank, list(free))

    async def leave(self, member: str) -> None:
        manager, request = self.prepare()
        text = partition_sql(request.place, manager.style).leave
        await manager.fetch_row(request.place, text, (request.group, member), needed=LIMITS)

    async def find_owner(self, partition: object) -> Holder | None:
        if isinstance(partition, bool) or not isinstance(partition, int):
            raise TypeError(f"partition must be an int, not {type(partition).__name__}")
        if not 0 <= partition < self.count:
            raise ValueError(f"partition must be from 0 to {self.count - 1}, not {partition}")
        manager, base = self.prepare()
        request = base.choose(partition)
        text = partition_sql(request.place, manager.style).find_owner
        row = await manager.fetch_row(request.place, text, (request.stored, request.group), needed=LIMITS)
        if row is None:
            return None
        count, hash_name, *holder, address = row
        if (count, hash_name) != (self.count, self.hash):
            raise self._build_mismatch_error(count, hash_name)
        return None if holder[0] is None else replace(build_lease_holder(request.names[0], holder), address=address)

    async def change_count(self, count: object) -> None:
        size = check_count(count)
        manager, request = self.prepare()
        await manager.verify(request.place, needed=LIMITS)
        text = partition_sql(request.place, manager.style).resize
        args = request.group, size, request.hash
        try:
            row = await manager.execute_with_retry(request.place, text, args, _RESIZING, needed=LIMITS)
        except Exception as error:
            if is_row_locked(error):
                raise self._build_occupied_error() from error
            raise
        if row[0] is None:
            raise self._build_mismatch_error(row[1], row[2])
        if not row[0]:
            raise self._build_owned_error(row)
        self.count = size
        self._request = None

    def _build_mismatch_error(self, count: int, hash_name: str) -> ValueError:
        return ValueError(
            f"{format_names((self._name,))} has {count} {'partition' if count == 1 else 'partitions'} by {hash_name}, not"
            f" {self.count} by {self.hash}, and a key could belong to a different partition under each setting. Use count={count} and"
            f" hash={hash_name!r}, or stop all workers and call resize(); another hash needs another name"
        )

    def _build_owned_error(self, row: Row) -> LockTimeoutError:
        _, partition, kind, owner, host, pid, backend_pid, purpose, token, since, expires_at = row
        name = f"{self._name}/{partition}"
        holder = build_lease_holder(
            unqualify_name(name), (kind, owner, host, pid, backend_pid, None, purpose, token, since, expires_at)
        )
        return LockTimeoutError(
            f"{format_names((self._name,))} was not resized, and nothing was done: partition {partition} is owned by {holder}. Stop all"
            " workers first, so that no key has two owners",
            names=(self._name,),
            timeout=0.0,
            holders=[holder],
        )

    def _build_occupied_error(self) -> LockTimeoutError:
        return LockTimeoutError(
            f"{format_names((self._name,))} was not resized, and nothing was done: a transaction of a former owner is still open. End"
            " that transaction, then resize again",
            names=(self._name,),
            timeout=_RESIZING,
        )

    def describe(self) -> str:
        return f"{self._name!r}, {self.count}, hash={self.hash!r}, ttl={self._terms.ttl:g}"
