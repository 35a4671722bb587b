"""The edit form of edit_form_flask.py on FastAPI, with an AsyncSession.

pip install "pgfence[fastapi,asyncpg]" uvicorn
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
uvicorn edit_form_fastapi:app
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence import (
    IfMatch,
    PgfenceError,
    VersionConflictError,
    Versioned,
    VersionedSession,
    etag,
    if_match,
    load_for_version,
)

engine = create_async_engine("postgresql+asyncpg://")  # reads PGHOST, PGDATABASE, ...
Sessions = async_sessionmaker(engine, sync_session_class=VersionedSession)


class Base(DeclarativeBase):
    pass


class Page(Versioned, Base):
    __tablename__ = "page"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str]


class Edit(BaseModel):
    title: str


class PageOut(BaseModel):
    title: str
    version: int


async def get_session() -> AsyncIterator[AsyncSession]:
    async with Sessions.begin() as session:
        yield session


def read_version(request: Request) -> IfMatch:
    """Return the version that the client has seen."""
    try:
        return if_match(request.headers)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


SessionDep = Annotated[AsyncSession, Depends(get_session, scope="function")]
VersionDep = Annotated[IfMatch, Depends(read_version)]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.get("/pages/{page_id}")
async def show(page_id: int, session: SessionDep, response: Response) -> PageOut:
    page = await session.get(Page, page_id)
    if page is None:
        raise HTTPException(404)
    response.headers["ETag"] = etag(page)
    return PageOut(title=page.title, version=page.version)


@app.put("/pages/{page_id}")
async def save(
    page_id: int,
    edit: Edit,
    expected: VersionDep,
    session: SessionDep,
    response: Response,
) -> PageOut:
    page = await load_for_version(session, Page, page_id, expected)
    page.title = edit.title
    await session.flush()  # sets the new version, which the ETag needs
    response.headers["ETag"] = etag(page)
    return PageOut(title=page.title, version=page.version)


@app.exception_handler(PgfenceError)
def reject(request: Request, error: PgfenceError) -> JSONResponse:
    deleted = isinstance(error, VersionConflictError) and any(
        row.found is None for row in error.items
    )
    status = 404 if deleted else error.http_status
    return JSONResponse({"detail": type(error).__name__}, status)
