"""A payment provider for tests: it charges a card once for each idempotency key.

uvicorn provider:app --port 8001
"""

from typing import Annotated

from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

LIMIT = 10_000


class ChargeIn(BaseModel):
    order: int
    amount: int


class Charge(ChargeIn):
    id: str


app = FastAPI(title="Provider")
charges: dict[str, Charge] = {}


@app.post("/charges", status_code=201)
async def charge(body: ChargeIn, idempotency_key: Annotated[str, Header()]) -> Charge:
    if body.amount > LIMIT:
        raise HTTPException(402, "the card was declined")
    new = Charge(id=f"ch_{len(charges) + 1}", order=body.order, amount=body.amount)
    return charges.setdefault(idempotency_key, new)


@app.get("/charges")
async def all_charges() -> list[Charge]:
    return list(charges.values())
