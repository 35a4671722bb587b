"""8 The same edit in FastAPI, async."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from app import async_engine
from guarded import Page
from pgfence import IfMatch, PgfenceError, VersionConflictError, VersionedSession, etag, if_match, load_for_version

Sessions = async_sessionmaker(async_engine, sync_session_class=VersionedSession)


class Edit(BaseModel):
    title: str


class PageOut(BaseModel):
    title: str
    version: int


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    yield
    await async_engine.dispose()


async def session() -> AsyncIterator[AsyncSession]:
    async with Sessions.begin() as opened:
        yield opened


def seen(request: Request) -> IfMatch:
    try:
        return if_match(request.headers)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


SessionDep = Annotated[AsyncSession, Depends(session, scope="function")]
Seen = Annotated[IfMatch, Depends(seen)]
app = FastAPI(lifespan=lifespan)


@app.get("/pages/{id}")
async def show(id: int, session: SessionDep, response: Response) -> PageOut:
    page = await session.get(Page, id)
    if page is None:
        raise HTTPException(404)
    response.headers["ETag"] = etag(page)
    return PageOut(title=page.title, version=page.version)


@app.put("/pages/{id}")
async def put(id: int, edit: Edit, expected: Seen, session: SessionDep, response: Response) -> PageOut:
    page = await load_for_version(session, Page, id, expected)
    page.title = edit.title
    await session.flush()
    response.headers["ETag"] = etag(page)
    return PageOut(title=page.title, version=page.version)


@app.exception_handler(PgfenceError)
def refused(request: Request, error: PgfenceError) -> JSONResponse:
    gone = isinstance(error, VersionConflictError) and any(row.found is None for row in error.items)
    return JSONResponse({"detail": type(error).__name__}, 404 if gone else error.http_status)
