"""A consumer in a web application, run by the elected leader."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request

from app import AsyncSessionLocal, Job, async_engine
from pgfence import AsyncElection, AsyncMember, AsyncTerm, claim


async def drain(term: AsyncTerm) -> None:
    while not term.lost:
        async with term.begin(AsyncSessionLocal) as session:
            for job in await claim(session, Job, Job.state == "new", order_by=Job.id, limit=10):
                job.state = "done"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    async with AsyncElection(async_engine, "outbox", ttl=15).stand(owner=os.environ["POD_NAME"]) as member:
        app.state.member = member
        app.state.outbox = asyncio.create_task(member.run(drain))
        yield


app = FastAPI(lifespan=lifespan)


def get_member(request: Request) -> AsyncMember:
    member: AsyncMember = request.app.state.member
    return member


Member = Annotated[AsyncMember, Depends(get_member)]


@app.get("/healthz")
def health(m: Member) -> dict[str, bool | int | None]:
    return {"leader": m.is_leader, "term": m.term and m.term.token}
