"""The version of an instance is read together with the columns that it guards.

A version that is read after the rest of the row would belong to a later state of it, and let a change in between be lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import event
from sqlalchemy.orm.base import NO_VALUE

from pgfence.errors import VersionRequiredError
from pgfence.versions._mapping import ATTRIBUTE, VersionedBase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.orm import InstanceState, Mapper, QueryContext

    State = InstanceState[object]


def _refreshed(state: State, _context: QueryContext, names: Iterable[str] | None) -> None:
    """Read columns of an expired instance again, with the version: `refresh()` of some columns and deferred ones leave it out."""
    session, target = state.session, state.obj()
    if ATTRIBUTE in state.dict or names is None or session is None or target is None:
        return
    loaded = [name for name in names if name in state.mapper.column_attrs]
    if loaded:
        with session.no_autoflush:
            session.refresh(target, [*loaded, ATTRIBUTE])


def expect_read(mapper: Mapper[object], state: State) -> None:
    """Raise if columns of a row that is about to be written were read without its version.

    Raises:
        VersionRequiredError: some were.
    """
    keys = {prop.key for prop in mapper._identity_key_props}
    for name in set(mapper.column_attrs.keys()) - keys:
        if name in state.dict and state.committed_state.get(name) is not NO_VALUE:
            raise VersionRequiredError(
                f"{mapper.class_.__name__} {tuple(state.identity or ())} was read without its version, so that changes of other"
                f" sessions since then would be lost: select the column of {mapper.class_.__name__}.{ATTRIBUTE} as well, or call"
                " session.refresh() before you change the instance"
            )


event.listen(VersionedBase, "refresh", _refreshed, propagate=True, raw=True, restore_load_context=True)
