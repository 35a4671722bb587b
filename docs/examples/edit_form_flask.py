"""An edit form on Flask that rejects a save if the row has changed since it was read.

pip install "pgfence[psycopg]" flask-sqlalchemy
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
flask --app edit_form_flask run
"""

from flask import Flask, abort, jsonify, request
from flask.typing import ResponseReturnValue
from flask_sqlalchemy import SQLAlchemy
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


class Base(DeclarativeBase):
    pass


class Page(Versioned, Base):  # adds the column "version"
    __tablename__ = "page"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str]


app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://"  # from PGHOST, ...
db = SQLAlchemy(app, session_options={"class_": VersionedSession})


@app.get("/pages/<int:page_id>")
def show(page_id: int) -> ResponseReturnValue:
    page = db.session.get(Page, page_id)
    if page is None:
        abort(404)
    return jsonify(title=page.title, version=page.version), {"ETag": etag(page)}


@app.put("/pages/<int:page_id>")
@app.post("/pages/<int:page_id>")
def save(page_id: int) -> ResponseReturnValue:
    page = load_for_version(db.session, Page, page_id, expected=read_version())
    page.title = request.form["title"]
    db.session.commit()
    return jsonify(title=page.title, version=page.version), {"ETag": etag(page)}


def read_version() -> IfMatch | int:
    """Return the version that the client has seen."""
    try:
        if request.method == "POST":  # an HTML form cannot send the header If-Match
            return int(request.form["version"])
        return if_match(request.headers)
    except ValueError as error:
        abort(400, str(error))


@app.errorhandler(VersionConflictError)
def reject_conflict(error: VersionConflictError) -> ResponseReturnValue:
    rows = [
        {"pk": row.pk, "expected": row.expected, "found": row.found}
        for row in error.items
    ]
    deleted = any(row.found is None for row in error.items)
    status = 404 if deleted else error.http_status
    return jsonify(error="the page has changed", rows=rows), status


@app.errorhandler(PgfenceError)
def reject(error: PgfenceError) -> ResponseReturnValue:
    return jsonify(error=type(error).__name__), error.http_status
