"""Find the resource that a row of a fenced class belongs to, and the token that this transaction has for it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Never
from weakref import WeakKeyDictionary

from sqlalchemy import Column
from sqlalchemy import inspect as mapped
from sqlalchemy.orm import ColumnProperty

from pgfence._holds.carriers import THREADS, find_task_contender
from pgfence._orm import upsert_of
from pgfence._sql.storage import table_names_of
from pgfence._sql.transaction import read_driver_state
from pgfence.config import config_of
from pgfence.errors import FenceRequiredError, StaleFencingTokenError, TransactionStateError
from pgfence.fence._entering import block_commit, get_entered_token
from pgfence.keys import qualify_name, unqualify_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import ClassVar, Literal

    from sqlalchemy import Connection
    from sqlalchemy.engine.default import DefaultExecutionContext
    from sqlalchemy.orm import Mapper

    from pgfence._sql.storage import TableNames

ATTRIBUTE = "fence_token"
MODEL = "pgfence_fence"
"""The key of the class in the column's `info`, for migrations that compare the class's table with the database."""
MODES = ("gate", "row")
_MISSING = object()
_SCHEMAS = "schema_translate_map"


class Guarded:
    """The base of the mixin, for the modules that it imports. There are no annotations at run time, because pydantic reads them."""

    if TYPE_CHECKING:
        __fence__: ClassVar[Literal["gate", "row"]]
        # The type is Any, because users override it with a str, or with a static method whose row is of their own class.
        __fence_resource__: Any
        __fence_column__: ClassVar[str]
    else:
        __fence__ = "gate"
        __fence_column__ = ATTRIBUTE


def check_settings(cls: type[Guarded]) -> None:
    """Raise an error unless the settings of a class that is being mapped are usable."""
    if cls.__fence__ not in MODES:
        raise ValueError(f"{cls.__name__}.__fence__ must be 'gate' or 'row', not {cls.__fence__!r}")
    asked = getattr(cls, "__fence_resource__", None)
    if isinstance(asked, str):
        qualify_name(asked, "", f"{cls.__name__}.__fence_resource__")
    elif not callable(asked):
        raise TypeError(
            f"{cls.__name__}.__fence_resource__ must be a str, or a static method that takes the row and returns a str, not {asked!r}"
        )
    name: object = cls.__fence_column__
    if not isinstance(name, str) or not name:
        raise TypeError(f"{cls.__name__}.__fence_column__ must be the name of a column, not {name!r}")


def has_single_resource(cls: type[Guarded]) -> bool:
    """Return whether all rows of a class belong to one resource."""
    return isinstance(cls.__fence_resource__, str)


def column_of(mapper: Mapper[object]) -> Column[int]:
    column = mapper.column_attrs[ATTRIBUTE].columns[0]
    assert isinstance(column, Column)
    return column


class View:
    """A past or future state of a row. A function provides its column values, and the class its methods and properties."""

    def __init__(self, cls: type[Guarded], look: Callable[[str], object], *, exact: bool = True) -> None:
        """Create a view. `look` returns the value of an attribute.

        `exact` is False if the row may belong to a subclass. Reading what subclasses define differently then raises an error.
        """
        self._cls = cls
        self._look = look
        self._exact = exact

    def __getattr__(self, name: str) -> object:
        attributes = mapped(self._cls).attrs
        if name not in attributes:
            found = inspect.getattr_static(self._cls, name, _MISSING)
            if not self._exact:
                self._expect_shared(name, found)
            if found is _MISSING:
                raise AttributeError(f"{self._cls.__name__} has no attribute {name!r}", name=name, obj=self)
            return found.__get__(self, self._cls) if hasattr(found, "__get__") else found
        why = _explain_unusable(attributes[name])
        if why is not None:
            raise AttributeError(f"{self._cls.__name__}.__fence_resource__ may use only columns, and {name!r} {why}")
        return self._look(name)

    if not TYPE_CHECKING:  # type checkers must see a View

        @property
        def __class__(self):  # noqa: ANN204
            """The class of the row, so that isinstance() works."""
            if not self._exact and len(list(mapped(self._cls).self_and_descendants)) > 1:
                raise undetermined_error(
                    self._cls,
                    "the resource of a row depends on its class, which the statement does not determine",
                    _NO_CLASS,
                )
            return self._cls

    def _expect_shared(self, name: str, found: object) -> None:
        for mapper in mapped(self._cls).self_and_descendants:
            if inspect.getattr_static(mapper.class_, name, _MISSING) is not found:
                raise undetermined_error(
                    self._cls,
                    f"the resource of a row depends on {name!r}, which differs in the subclass {mapper.class_.__name__}",
                    _NO_CLASS,
                )


def _explain_unusable(attribute: object) -> str | None:
    """Return why a resource cannot depend on an attribute, or None if it can."""
    if not isinstance(attribute, ColumnProperty) or not isinstance(attribute.columns[0], Column):
        return "is not a column"
    column = attribute.columns[0]
    if column.onupdate is not None or column.server_onupdate is not None or column.computed is not None:
        return "may change automatically in an UPDATE"
    return None


_UNSTEADY: WeakKeyDictionary[type[Guarded], bool] = WeakKeyDictionary()
"""Whether a class has columns, other than that of the token, on which a resource cannot depend."""


def _is_unsteady(cls: type[Guarded]) -> bool:
    columns = mapped(cls).column_attrs
    found = any(prop.key != ATTRIBUTE and _explain_unusable(prop) is not None for prop in columns)
    _UNSTEADY[cls] = found
    return found


def view_of(cls: type[Guarded], values: Mapping[str, object], way: str) -> View:
    """Return a view of a row with these values. Reading any other column of the row raises FenceRequiredError.

    `way` says how to make the value of such a column known.
    """

    def read(name: str) -> object:
        if name not in values:
            raise undetermined_error(
                cls,
                f"the resource of a row depends on {name!r}, whose value is not known before the statement runs",
                f"{FLUSH}, or {way}",
            )
        return values[name]

    return View(cls, read, exact=False)


def resource_of(cls: type[Guarded], row: object) -> str:
    """Return the resource of a row, without the namespace."""
    asked = cls.__fence_resource__
    found = asked if isinstance(asked, str) else asked(row)
    if not isinstance(found, str):
        raise TypeError(f"{cls.__name__}.__fence_resource__ must return a str, not {type(found).__name__}")
    return found


def find_flushed_resource(cls: type[Guarded], target: object) -> str:
    """Return the resource that a row will belong to after its object is flushed."""
    asked = cls.__fence_resource__
    if isinstance(asked, str):
        return asked
    unsteady = _UNSTEADY[cls] if cls in _UNSTEADY else _is_unsteady(cls)
    return resource_of(cls, View(cls, lambda name: getattr(target, name)) if unsteady else target)


def choose_token(cls: type[Guarded], resource: str, connection: Connection) -> int:
    """Return the token that this transaction has for a resource."""
    name = qualify_name(resource, config_of(connection).namespace, f"{cls.__name__}.__fence_resource__")
    token = get_entered_token(connection, name)
    # In mode "row", the stored token is compared under the row's lock, so the token of a lock that this task holds is sufficient,
    # without a gate.
    if token is None and cls.__fence__ == "row":
        if read_driver_state(connection).autocommit:
            raise TransactionStateError(
                f"{cls.__name__} is fenced, and the connection is in autocommit, where the lock on a row ends before the row is"
                " written: use a connection without AUTOCOMMIT"
            )
        token = _find_held_token(name, table_names_of(connection))
    if token is None:
        raise FenceRequiredError(
            f"{cls.__name__} is fenced by {unqualify_name(name)!r}, and this transaction has no token for it: write inside"
            f" lease.begin(...), or fenced(session, {resource!r}, token)",
            resource=unqualify_name(name),
        )
    return token


def _find_held_token(name: str, place: TableNames) -> int | None:
    owner = find_task_contender() or THREADS.get_contender()
    for hold in reversed(owner.holds):
        if hold.stored == name and hold.token is not None and not place.contradicts(hold.place):
            # The holder of a lease that has expired on this process's clock must not write, even if the server would still accept
            # it.
            hold.check()
            return hold.token
    return None


FLUSH = "write such rows through a flush"
_NO_CLASS = f"{FLUSH}, or let __fence_resource__ use the discriminator column instead of the class"
NO_UPSERT = f"{FLUSH}, or with update() and an insert() without ON CONFLICT"
NO_SELECT = f"{FLUSH}, or with insert() and values()"


def undetermined_error(cls: type[Guarded], why: str, way: str) -> FenceRequiredError:
    """Return the error for a statement whose rows cannot be determined in advance. `way` says what to do instead."""
    return FenceRequiredError(f"{cls.__name__} is fenced, and {why}: {way}")


def read_schema_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return the execution options of a statement that select the schema of its tables."""
    return {name: options[name] for name in (_SCHEMAS,) if name in options}


def reject_stale(connection: Connection, resource: str, token: int, newest: int) -> Never:
    """Raise the error for a row that a newer token wrote, and make the transaction unable to commit."""
    error = StaleFencingTokenError(
        f"token {token} for {resource!r} is stale: a row was written under token {newest}, so a newer holder has taken over. "
        f"No change of this transaction is committed: roll back",
        resource=resource,
        token=token,
        newest=newest,
        sqlstate=None,
    )
    # The caller may swallow the error, and the server itself has no reason to reject the COMMIT.
    block_commit(connection, error)
    raise error


# ------------------------------------------------------------ inserts outside a flush: the default of the column


def on_insert(cls: type[Guarded], context: DefaultExecutionContext) -> int:
    """Return the token for a row that is inserted outside a flush. The column calls this function as its default for each row."""
    statement = context.compiled and context.compiled.statement
    if upsert_of(statement) is not None and not (has_single_resource(cls) and cls.__fence__ == "gate"):
        raise undetermined_error(
            cls, "the rows that an upsert conflicts with cannot be determined before it runs", NO_UPSERT
        )
    if has_single_resource(cls):
        return choose_token(cls, resource_of(cls, None), context.root_connection)
    if getattr(statement, "select", None) is not None:
        raise undetermined_error(
            cls, "the rows of an INSERT from SELECT cannot be determined before it runs", NO_SELECT
        )
    given = view_of(cls, _collect_given(cls, context), "pass the value in values()")
    return choose_token(cls, resource_of(cls, given), context.root_connection)


def _collect_given(cls: type[Guarded], context: DefaultExecutionContext) -> dict[str, object]:
    """Return the values that an INSERT gives to the row whose default is computed."""
    # context.get_current_parameters() fails for several VALUES and for columns of mapped classes.
    values, column, compiled = context.current_parameters, context.current_column, context.compiled
    assert values is not None
    assert column is not None
    suffix = ""
    if getattr(compiled and compiled.compile_state, "_has_multi_parameters", False):
        suffix = f"_m{getattr(column, 'index', -1) + 1 if column._is_multiparam_column else 0}"
    found: dict[str, object] = {}
    for prop in mapped(cls).column_attrs:
        name = str(prop.columns[0].key)
        for key in (name + suffix, name) if suffix == "_m0" else (name + suffix,):
            if key in values:
                found[prop.key] = values[key]
                break
    return found
