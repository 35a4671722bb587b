"""The type of the system column xmin: a transaction's number, which counts from 0 again after 2**32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Text, cast
from sqlalchemy.types import UserDefinedType

if TYPE_CHECKING:
    from sqlalchemy import BindParameter, ColumnElement, Dialect
    from sqlalchemy.sql.type_api import _BindProcessorType, _ResultProcessorType


class Xid(UserDefinedType[int]):
    """An int here, an xid there. It is sent as text: PostgreSQL compares no integer with an xid, and half of them are negative."""

    cache_ok = True

    @property
    def python_type(self) -> type[int]:
        return int

    def get_col_spec(self, **_: object) -> str:
        return "XID"

    def bind_expression(self, bindvalue: BindParameter[int]) -> ColumnElement[int]:
        return cast(cast(bindvalue, Text), Xid)

    def bind_processor(self, dialect: Dialect) -> _BindProcessorType[int]:
        return lambda value: None if value is None else str(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> _ResultProcessorType[int]:
        # psycopg and psycopg2 give a str, asyncpg an int.
        return lambda value: None if value is None else int(value)
