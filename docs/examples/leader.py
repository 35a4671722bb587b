"""Send the messages of an outbox on one of many instances of a web application.

pip install "pgfence[fastapi,psycopg,asyncio]" uvicorn
psql -c "CREATE TABLE outbox (id bigserial PRIMARY KEY, sent boolean NOT NULL DEFAULT false)"
POD_NAME=$(hostname) uvicorn leader:app
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence import AsyncElection, AsyncMember, AsyncTerm, claim

log = logging.getLogger(__name__)
async_engine = create_async_engine("postgresql+psycopg://")
AsyncSessionLocal = async_sessionmaker(async_engine)


class Base(DeclarativeBase):
    pass


class Message(Base):
    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(primary_key=True)
    sent: Mapped[bool]


async def drain(term: AsyncTerm) -> None:
    while not term.lost:
        async with term.begin(AsyncSessionLocal) as session:
            messages = await claim(
                session, Message, ~Message.sent, order_by=Message.id, limit=10
            )
            for message in messages:
                message.sent = True  # send the message here
        if not messages:
            await asyncio.sleep(1)


async def lead(member: AsyncMember) -> None:
    while True:
        try:
            return await member.run(drain)  # returns when the member resigns
        except Exception:
            log.exception("the term ends with an error")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    async with AsyncElection(async_engine, "outbox", ttl=15).stand(
        owner=os.environ["POD_NAME"]
    ) as member:
        app.state.member = member
        app.state.outbox = asyncio.create_task(lead(member))
        yield


app = FastAPI(lifespan=lifespan)


def get_member(request: Request) -> AsyncMember:
    member: AsyncMember = request.app.state.member
    return member


Member = Annotated[AsyncMember, Depends(get_member)]


@app.get("/healthz")
def health(m: Member) -> dict[str, bool | int | None]:
    return {"leader": m.is_leader, "term": m.term and m.term.token}
