"""The ledger as a web application."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends, FastAPI
from ledger import transfer
from pydantic import BaseModel
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from pgfence.fastapi import install_error_handlers

SessionLocal = sessionmaker(create_engine("postgresql+psycopg://"))


class Transfer(BaseModel):
    src: int
    dst: int
    amount: int


def get_session() -> Iterator[Session]:
    with SessionLocal.begin() as session:
        yield session


SessionDep = Annotated[Session, Depends(get_session, scope="function")]
app = FastAPI()
install_error_handlers(app)


@app.post("/transfer", status_code=204)
def post_transfer(t: Transfer, session: SessionDep) -> None:
    transfer(session, t.src, t.dst, t.amount)
