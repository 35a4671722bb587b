"""The decisions of both middlewares, without a server: keys, routes, principals, and what is stored of a response."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgfence._http.answers import UNRECORDABLE, ProblemResponse, build_refusal, build_replay
from pgfence._http.problems import KEY_INVALID, retry_headers
from pgfence._http.routes import compile_routes
from pgfence._http.rules import SHOWN, HttpRequest, Rules, parse_key, parse_length, select_headers
from pgfence.effects._claim import Reply, StoredResult
from pgfence.errors import (
    AttemptLostError,
    IdempotencyInProgressError,
    IdempotencyKeyReusedError,
    IdempotencyMisuseError,
    SchemaError,
    UnreachableError,
)
from support.rows import every_row


def rules(**options: Any) -> Rules:
    usual: dict[str, Any] = {
        "principal": None,
        "methods": ("POST", "PATCH"),
        "routes": None,
        "record_below": 500,
        "max_body": 100,
        "ttl": 60,
        "keep": 86400,
        "on_failure": "free",
    }
    return Rules.of(**(usual | options))


def request(**known: Any) -> HttpRequest:
    usual: dict[str, Any] = {
        "method": "POST",
        "root": "",
        "path": "/pay",
        "query": b"",
        "content_type": b"application/json",
        "keys": ("k",),
        "credentials": (b"authorization:me",),
        "length": None,
    }
    return HttpRequest(**(usual | known))


# ---------------------------------------------------------------- keys


@every_row(
    ("value", "key"),
    [
        ('"k1"', "k1"),
        ("k1", "k1"),
        ('\t "k1" ', "k1"),
        ('"with space, comma; and \\"quotes\\" \\\\"', 'with space, comma; and "quotes" \\'),
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ("a+/=:.~_!#$%&'()*<>?@[]^`{|}", "a+/=:.~_!#$%&'()*<>?@[]^`{|}"),
        ("k" * 255, "k" * 255),
        ('"' + "k" * 255 + '"', "k" * 255),
        ('"' + '\\"' * 255 + '"', '"' * 255),
    ],
)
def test_a_key_is_a_string_with_or_without_its_quotes(value: str, key: str) -> None:
    """What RFC 9651 calls a string, and the bare form, are one key."""
    assert parse_key([value]) == key


@every_row(
    "values",
    [
        [],
        ["a", "b"],
        ["a", "a"],
        [""],
        ["  "],
        ['""'],
        ['"   "'],
        ['"a'],
        ['a"'],
        ['"a"b'],
        ['"a", "b"'],
        ["a, b"],
        ["a,b"],
        ["a b"],
        ['"a";p=1'],
        ["a;p=1"],
        ['"a\\b"'],
        ["a\\b"],
        ['"a\tb"'],
        ["a\x00b"],
        ['"a\x7f"'],
        ["ü"],
        ['"\N{PILE OF POO}"'],
        ["k" * 256],
        ['"' + "k" * 256 + '"'],
        ["k" * 10_000_000],
        ['"' + "k" * 10_000_000 + '"'],
        ['"' + '\\"' * 5_000_000 + '"'],
    ],
)
def test_an_invalid_key_is_rejected_with_words_for_the_client(values: list[str]) -> None:
    """C108: none, several, too long, blank, or with characters that a structured-field string cannot contain."""
    with pytest.raises(ValueError, match=r"^(The|This) .*Idempotency-Key.*\.$"):
        parse_key(values)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=120).filter(str.strip))
def test_every_printable_text_is_a_key_when_it_is_quoted(key: str) -> None:
    """A key that the client quotes according to the RFC is parsed back to the same text."""
    quoted = key.replace("\\", "\\\\").replace('"', '\\"')
    assert parse_key([f'"{quoted}"']) == key


# ---------------------------------------------------------------- routes and methods


@every_row(
    ("route", "matches", "others"),
    [
        ("/pay", ["/pay", "/pay/", "/pay\n", "/pay/\n", "//pay", "//pay//"], ["/pay/1", "/", "/payx", "/x/pay"]),
        ("/pay/", ["/pay/", "/pay", "/pay/\n"], ["/", "/pay/1"]),
        ("/", ["/", "", "//", "/\n"], ["/x"]),
        (
            "/orders/{id}/pay",
            ["/orders/7/pay", "/orders/a b/pay", "/orders/7//pay", "/orders/7/pay/"],
            ["/orders//pay", "/orders/1/2/pay"],
        ),
        ("/orders/{id:int}.json", ["/orders/7.json"], ["/orders/7xjson", "/orders/.json"]),
        (
            "/files/{name:path}",
            ["/files/", "/files/a", "/files/a/b", "/files//", "/files/a\n"],
            ["/file", "/x/files/a"],
        ),
        ("/files/{name:path}/meta", ["/files//meta", "/files/a/b/meta"], ["/files/meta/x"]),
        ("/v1/*", ["/v1/", "/v1/a/b", "/v1/a\nb"], ["/v1", "/v2/a"]),
        ("/a+b(c)", ["/a+b(c)"], ["/aab(c)"]),
        ("/a//b", ["/a//b", "/a/b"], ["/a", "/ab"]),
    ],
)
def test_a_route_matches_the_whole_path(route: str, matches: list[str], others: list[str]) -> None:
    """A field is one segment, with `:path` several; a star at the end is anything; all else is literal.

    What a framework may take for the same path is the same: with a slash at the end or without, with one twice, and with the
    line feed before which a regular expression lets a text end.
    """
    ours = rules(routes=[route, "/never"])
    assert [path for path in matches + others if ours.applies_to(request(path=path))] == matches


def test_no_path_takes_long_to_compare() -> None:
    """A client without a key cannot keep the server busy with a path of 64 kB."""
    ours = rules(routes=["/x/{p:path}/y/{a}/z", "/{a}/{b}/{c}/{d}/e", "/a-{b}-c/d*", "/{p:path}/y/z*"])
    for path in ("/x" + "/y/" * 20_000, "/" + "a" * 64_000, "/" * 64_000 + "\n\n", "/a" + "-" * 64_000, "/\n" * 30_000):
        ours.applies_to(request(path=path))
    for route in ("/p/{a}-{b}", "/files/{name}.{ext}", "/{a}{b}", "/{a:path}/x/{b:path}", "/{a:path}.{b}"):
        with pytest.raises(ValueError, match="one field"):
            compile_routes([route])


@every_row("routes", [[], ["pay"], [""], ["/a*b"], ["/a/<id>"], ["/a/{id"], ["/a/{}"], ["/a?b"]])
def test_a_route_that_could_never_match_is_rejected(routes: list[str]) -> None:
    """A middleware that protects nothing is a mistake; so is the notation of another framework."""
    with pytest.raises(ValueError, match="route"):
        compile_routes(routes)


@every_row("routes", ["/pay", [b"/pay"], [None]])
def test_routes_are_texts(routes: Any) -> None:
    """A single str would otherwise be read as one route per character."""
    with pytest.raises(TypeError, match="route"):
        compile_routes(routes)


def test_without_routes_requests_without_a_key_pass() -> None:
    """On named routes a key is required; otherwise it is optional."""
    everywhere, named = rules(), rules(routes=["/pay"])
    keyless = request(keys=())
    assert (everywhere.applies_to(request()), everywhere.applies_to(keyless)) == (True, False)
    assert (named.applies_to(request()), named.applies_to(keyless), named.applies_to(request(path="/x"))) == (
        True,
        True,
        False,
    )
    assert not named.applies_to(request(method="PUT"))
    assert named.applies_to(request(method="post")), "some frameworks take it for POST"
    with pytest.raises(ProblemResponse) as told:
        named.read_key(keyless)
    assert told.value.reply.status == 400


@every_row(
    ("options", "error"),
    [
        ({"methods": "POST"}, TypeError),
        ({"methods": []}, ValueError),
        ({"methods": ["P OST"]}, ValueError),
        ({"methods": ["get"]}, ValueError),
        ({"record_below": 200}, ValueError),
        ({"record_below": 601}, ValueError),
        ({"max_body": -1}, ValueError),
        ({"ttl": 0.1}, ValueError),
        ({"ttl": "60"}, TypeError),
        ({"keep": 30}, ValueError),
        ({"keep": timedelta(seconds=59)}, ValueError),
        ({"on_failure": "keep"}, ValueError),
        ({"principal": "me"}, TypeError),
    ],
)
def test_unusable_arguments_are_rejected_in_the_constructor(options: Any, error: type[Exception]) -> None:
    """C110: also a record that would be forgotten before a dead request is given up."""
    with pytest.raises(error):
        rules(**options)


# ---------------------------------------------------------------- whose, and for what


@every_row("announced", ["5" * 5000, "1048577", "101", "0" * 5000])
def test_a_length_that_is_too_long_is_one_whatever_its_digits(announced: str) -> None:
    """A length with more digits than any body can have is rejected without parsing it as a number."""
    assert parse_length("99") == 99
    with pytest.raises(ProblemResponse) as told:
        rules().read_key(request(length=parse_length(announced)))
    assert told.value.reply.status == 413


@every_row("announced", ["", "-1", "+5", " 5", "0x10", "\u00b2", "\u0663"])
def test_what_is_no_length_is_none(announced: str) -> None:
    """A length consists of digits only; for any other text the result is None."""
    assert parse_length(announced) is None


def test_by_default_the_principal_is_a_digest_of_the_credentials() -> None:
    """No token can be read from a scope, and the same text in another header is another principal."""
    ours = rules()
    found = {
        ours.find_principal(request(credentials=credentials), None)
        for credentials in ((b"authorization:me",), (b"cookie:me",), (b"authorization:me", b"cookie:me"))
    }
    assert len(found) == 3
    assert not any("me" in one for one in found)
    assert ours.find_principal(request(), None) == ours.find_principal(request(path="/other"), None)


async def test_a_request_without_a_principal_has_no_key() -> None:
    """Without credentials, or with None from the function, it is rejected; a value that is not a str raises TypeError."""

    async def later(_: Any) -> str:
        return "me"

    with pytest.raises(ProblemResponse) as told:
        rules().find_principal(request(credentials=()), None)
    assert told.value.reply.status == 400
    for nobody in (None, ""):
        with pytest.raises(ProblemResponse):
            rules(principal=lambda _, found=nobody: found).find_principal(request(), None)
    for mistake in (lambda _: 7, later):
        with pytest.raises(TypeError, match="principal must return a str"):
            rules(principal=mistake).find_principal(request(), None)
    assert rules(principal=lambda raw: raw["user"]).find_principal(request(), {"user": "me"}) == "me"


def test_a_scope_keeps_principals_methods_and_paths_apart() -> None:
    """C102: no two give the same scope, however they are cut; it stays short, and a person can read the path."""
    ours = rules()
    asked = [
        (request(), "me"),
        (request(), "you"),
        (request(method="PATCH"), "me"),
        (request(method="post"), "me"),
        (request(path="/pay/"), "me"),
        (request(path="/pa"), "yme"),
        (request(root="/api"), "me"),
        (request(path="/" + "x" * 5000), "me"),
        (request(path="/" + "x" * 5001), "me"),
        (request(path="/\udc80\n"), "me"),
    ]
    scopes = [ours.build_effect_key(one, owner, "k", b"").scope for one, owner in asked]
    assert len(set(scopes)) == len(scopes)
    assert max(map(len, scopes)) <= SHOWN + 72
    assert all(scope.isprintable() and scope.isascii() for scope in scopes)
    assert scopes[0].startswith("POST /pay ")
    assert ours.build_effect_key(request(root="/api", path="/pay"), "me", "k", b"").scope == scopes[6]


def test_a_fingerprint_tells_query_type_and_body_apart() -> None:
    """C102: requests that differ in query, content type or body have different fingerprints."""
    ours = rules()
    asked = [
        (request(), b"ab"),
        (request(), b"a"),
        (request(query=b"a"), b"b"),
        (request(content_type=b"application/jsonab"), b""),
        (request(content_type=b""), b"ab"),
    ]
    assert len({ours.build_effect_key(one, "me", "k", body).fingerprint for one, body in asked}) == len(asked)
    assert ours.build_effect_key(request(), "me", "k", b"ab") == ours.build_effect_key(request(), "me", "k", b"ab")


# ---------------------------------------------------------------- answers


def test_what_belongs_to_the_connection_or_the_moment_is_not_kept() -> None:
    """All other headers are stored, including repeated ones, in their order."""
    headers = [
        ("Location", "/payments/1"),
        ("Set-Cookie", "session=1"),
        ("DATE", "today"),
        ("Server", "x"),
        ("Connection", "close, X-Hop"),
        ("x-hop", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Link", "a"),
        ("Link", "b"),
        ("content-length", "3"),
    ]
    assert select_headers(headers) == (
        ("Location", "/payments/1"),
        ("Link", "a"),
        ("Link", "b"),
        ("content-length", "3"),
    )


def test_responses_are_stored_below_a_status_and_up_to_a_size() -> None:
    """C101: a response that asks for a retry is not recorded; of one that is too long only the fact that it was sent."""
    ours = rules(record_below=500, max_body=3)
    assert ours.build_record(201, [("date", "x"), ("a", "b")], b"abc") == Reply(201, (("a", "b"),), b"abc")
    assert ours.build_record(499, [], b"") is not None
    assert ours.build_record(500, [], b"") is None
    assert ours.build_record(503, [], None) is None
    later = [("Retry-After", "1")]
    assert [
        status for status in (202, 303, 401, 402, 404, 408, 423, 425, 429) if ours.build_record(status, later, b"")
    ] == [
        202,
        303,
    ]
    assert [
        status for status in (202, 401, 402, 404, 408, 409, 423, 425, 429) if ours.build_record(status, [], b"")
    ] == [
        202,
        402,
        404,
        409,
        423,
    ]
    whole = ours.build_record(200, [], None)
    assert whole is not None
    assert whole.status == 409
    assert b"was processed" in whole.body
    streams = [
        [("Content-Length", "4")],
        [("Content-Length", "4" * 5000)],
        [("content-type", "text/event-stream; charset=utf-8")],
        [("content-type", " Text/Event-Stream")],
    ]
    assert all(ours.is_streaming(headers) for headers in streams)
    assert not any(ours.is_streaming(headers) for headers in ([], [("content-length", "3")], [("content-length", "x")]))


@every_row(
    "header", [("x", "a\0b"), ("x", "a\nb"), ("x", "a\r"), ("x\0", "a"), ("x", "\N{EURO SIGN}"), ("x", "\ud800")]
)
def test_of_an_unstorable_response_only_the_fact_is_stored(header: tuple[str, str]) -> None:
    """The work is done: it must not be done again because of a character."""
    assert rules().build_record(201, [("a", "\xff\t"), header], b"") == UNRECORDABLE
    assert rules().build_record(500, [header], b"") is None


def test_a_waiter_gets_the_time_of_the_error_in_whole_seconds() -> None:
    """What the row of the key says, rounded up: never before the key is free, and a second while an attempt runs."""
    waits = {}
    for left in (59.0, 29.5, 0.1, None):
        error = IdempotencyInProgressError("secret", scope="s", key="k", retry_after=left)
        reply = build_refusal(error, "POST /pay")
        assert (reply.status, b"secret" in reply.body) == (409, False)
        waits[left] = dict(reply.headers)["retry-after"]
    assert waits == {59.0: "59", 29.5: "30", 0.1: "1", None: "1"}


@every_row(
    ("error", "status"),
    [
        (IdempotencyKeyReusedError("secret", scope="s", key="k"), 422),
        (AttemptLostError("secret", scope="s", key="k", attempt=1, newest=2), 409),
        (UnreachableError("secret"), 503),
        (SchemaError("secret"), 500),
    ],
)
def test_a_rejection_is_a_problem_response_without_secrets(error: Any, status: int) -> None:
    """The message of an error is only logged."""
    reply = build_refusal(error, "POST /pay")
    assert reply.status == status
    assert b"secret" not in reply.body
    headers = dict(reply.headers)
    assert (headers["content-type"], headers["content-length"]) == ("application/problem+json", str(len(reply.body)))


def test_an_endpoint_that_was_overtaken_says_when_to_come_back() -> None:
    """C101: without that its 409 would be recorded under the key of the request, and outlive what an operator does about it."""
    overtaken = AttemptLostError("secret", scope="s", key="k", attempt=1, newest=2)
    misused = IdempotencyKeyReusedError("secret", scope="s", key="k")
    assert (retry_headers(overtaken), retry_headers(misused)) == ({"retry-after": "1"}, {})


def test_a_replay_is_marked() -> None:
    """A recorded problem is replayed like any other response; a record that is not a response cannot be."""
    reply = build_replay(StoredResult("done", None, KEY_INVALID.reply("declined")))
    assert (reply.status, reply.headers[-1]) == (400, ("idempotent-replayed", "true"))
    with pytest.raises(IdempotencyMisuseError):
        build_replay(StoredResult("done", '"text"', None))
