"""8 Flask edit form with ETag."""

from __future__ import annotations

from flask import Flask, abort, jsonify, request
from flask.typing import ResponseReturnValue
from flask_sqlalchemy import SQLAlchemy

from guarded import Page
from pgfence import IfMatch, PgfenceError, VersionConflictError, VersionedSession, etag, if_match, load_for_version

app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://"
db = SQLAlchemy(app, session_options={"class_": VersionedSession})


@app.get("/pages/<int:id>")
def show(id: int) -> ResponseReturnValue:
    page = db.session.get(Page, id)
    if page is None:
        abort(404)
    return jsonify(title=page.title, version=page.version), {"ETag": etag(page)}


@app.put("/pages/<int:id>")
@app.post("/pages/<int:id>")
def save(id: int) -> ResponseReturnValue:
    page = load_for_version(db.session, Page, id, expected=seen())
    page.title = request.form["title"]
    db.session.commit()
    return jsonify(title=page.title, version=page.version), {"ETag": etag(page)}


def seen() -> IfMatch | int:
    try:
        if request.method == "POST":  # a form cannot send the header
            return int(request.form["version"])
        return if_match(request.headers)
    except ValueError as error:
        abort(400, str(error))


@app.errorhandler(VersionConflictError)
def conflict(error: VersionConflictError) -> ResponseReturnValue:
    rows = [{"pk": row.pk, "expected": row.expected, "found": row.found} for row in error.items]
    gone = any(row.found is None for row in error.items)
    return jsonify(error="somebody else was faster", rows=rows), 404 if gone else error.http_status


@app.errorhandler(PgfenceError)
def refused(error: PgfenceError) -> ResponseReturnValue:
    return jsonify(error=type(error).__name__), error.http_status
