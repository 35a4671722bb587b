"""Drain an outbox on one of many instances of a web application.

pip install "pgfence[fastapi,psycopg,asyncio]" uvicorn
psql -c "CREATE TABLE outbox (id bigserial PRIMARY KEY, sent boolean NOT NULL DEFAULT false)"
uvicorn leader:app
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from pgfence import AsyncElection, AsyncMember, AsyncTerm

async_engine = create_async_engine("postgresql+psycopg://")
AsyncSessionLocal = async_sessionmaker(async_engine)


async def drain(term: AsyncTerm) -> None:
    while not term.lost:
        async with term.begin(AsyncSessionLocal) as session:
            await session.execute(text("DELETE FROM outbox WHERE sent"))
        await asyncio.sleep(1)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    election = AsyncElection(async_engine, "outbox", ttl=15)
    async with election.stand(owner=os.environ.get("POD_NAME")) as member:
        app.state.member = member
        app.state.outbox = asyncio.create_task(member.run(drain))
        yield


app = FastAPI(lifespan=lifespan)


def get_member(request: Request) -> AsyncMember:
    member: AsyncMember = request.app.state.member
    return member


@app.get("/healthz")
def health(member: Annotated[AsyncMember, Depends(get_member)]) -> dict[str, object]:
    return {"leader": member.is_leader, "term": member.term and member.term.token}
