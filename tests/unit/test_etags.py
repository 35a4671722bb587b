"""The If-Match header: the grammar of RFC 9110, what matches, and what is rejected."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.datastructures import Headers as StarletteHeaders
from werkzeug.datastructures import Headers as WerkzeugHeaders

from pgfence.errors import VersionRequiredError
from pgfence.versions.etags import IfMatch, if_match
from support.rows import every_row

opaque = st.text([chr(code) for code in (0x21, *range(0x23, 0x7F), *range(0x80, 0x100))], max_size=12)
strong = opaque.map(lambda inner: f'"{inner}"')
weak = strong.map(lambda tag: f"W/{tag}")
blanks = st.text(" \t", max_size=3)
elements = st.one_of(strong, weak, st.just(""))


@st.composite
def headers(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A header as a sender may write it, and the tags in it."""
    tags = draw(st.lists(elements, max_size=6))
    return ",".join(draw(blanks) + tag + draw(blanks) for tag in tags), [tag for tag in tags if tag]


@given(headers())
def test_a_list_gives_its_tags_whatever_the_blanks_and_empty_elements(drawn: tuple[str, list[str]]) -> None:
    """Every list that the grammar allows is read: commas inside the quotes belong to the tag, empty elements are ignored."""
    header, tags = drawn
    found = if_match({"If-Match": header})
    assert list(found.tags) == tags
    assert if_match({"If-Match": str(found)}) == found


@given(headers(), strong)
def test_only_a_strong_tag_in_the_list_matches(drawn: tuple[str, list[str]], tag: str) -> None:
    """Strong comparison: character by character, and a weak tag on either side does not match."""
    header, tags = drawn
    found = if_match({"If-Match": header})
    assert found.matches(tag) == (tag in tags)
    assert not found.matches(f"W/{tag}")
    assert all(found.matches(one) != one.startswith("W/") for one in tags)


@given(strong)
def test_a_star_matches_every_tag(tag: str) -> None:
    """`*` requires a row, in any version; between quotes it is a tag like any other."""
    assert if_match({"If-Match": " * "}).matches(tag)
    assert if_match({"If-Match": '"*"'}).matches(tag) == (tag == '"*"')


@given(st.one_of(st.text(max_size=30), st.text('"W/*, \t\na\u00e9', max_size=12)))
@example('"a" "b"')
@example('w/"a"')
@example('"a\n"')
@example('"a"\n')
@example('"page-1", *')
@example("*, *")
@example('"\u0100"')
def test_anything_else_is_rejected_with_its_text(header: str) -> None:
    """Text that the grammar does not allow is a ValueError that shows what is wrong; the rest is read as written."""
    one = r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"'
    grammar = rf"[ \t]*(?:{one})?[ \t]*(?:,[ \t]*(?:{one})?[ \t]*)*"
    if header.strip(" \t") == "*":
        assert if_match({"If-Match": header}).tags == ("*",)
    elif re.fullmatch(grammar, header):
        assert if_match({"If-Match": header}).tags == tuple(re.findall(one, header))
    else:
        with pytest.raises(ValueError, match="invalid entity tag at"):
            if_match({"If-Match": header})


@every_row(
    ("header", "shown"),
    [
        ("page-1", "'page-1'"),
        ("1", "'1'"),
        ("'page-1'", "\"'page-1'\""),
        ('"page-1', "'\"page-1'"),
        ('"a", page-1', "' page-1'"),
        ('"a";"b"', '\'"a";"b"\''),
        ('"a b"', "'\"a b\"'"),
    ],
)
def test_a_malformed_tag_is_shown_in_the_error(header: str, shown: str) -> None:
    """The message has the offending text, and says what a list of tags looks like."""
    with pytest.raises(ValueError, match=re.escape(f"invalid entity tag at {shown}: If-Match must be * or a list")):
        if_match({"If-Match": header})


def test_a_long_malformed_header_is_cut_in_the_message() -> None:
    """The message does not repeat kilobytes of a stranger's header."""
    with pytest.raises(ValueError, match="invalid entity tag") as refused:
        if_match({"If-Match": "x" * 100_000})
    assert len(str(refused.value)) < 200


@every_row("header", ['"a",' + " " * 200_000 + "x", '"' * 199_999, "," * 200_000, '"a",' * 50_000 + "x"])
def test_a_hostile_header_costs_no_more_than_its_length(header: str) -> None:
    """200 kB of blanks, quotes or commas are read or rejected at once; a quadratic parser would need minutes."""
    try:
        if_match({"If-Match": header})
    except ValueError:
        pass


def test_a_missing_header_is_428() -> None:
    """C072: a request without a version is rejected with an error that has its status and says how to fix it."""
    for empty in ({}, WerkzeugHeaders(), StarletteHeaders({})):
        with pytest.raises(VersionRequiredError, match="If-Match") as refused:
            if_match(empty)
        assert refused.value.http_status == 428
        assert not refused.value.retryable


def test_an_empty_header_is_a_list_that_matches_nothing() -> None:
    """The grammar allows an empty list: the precondition fails, nothing is malformed."""
    assert not if_match({"If-Match": ""}).matches('"page-1"')


def test_headers_of_the_frameworks_and_plain_dicts_are_read() -> None:
    """Names of headers have no case in Flask and Starlette; a dict may have it in either."""
    for headers_ in (
        {"If-Match": '"a-1"'},
        {"if-match": '"a-1"'},
        WerkzeugHeaders({"IF-MATCH": '"a-1"'}),
        StarletteHeaders({"iF-mAtCh": '"a-1"'}),
    ):
        assert if_match(headers_) == IfMatch(('"a-1"',))


def test_several_statements_are_one_list() -> None:
    """RFC 9110, 5.3: a header that was sent in two lines is one list, though `get` of Starlette knows the first alone."""
    lines = [(b"if-match", b'"a-1"'), (b"if-match", b'"a-2", "a-3"')]
    assert if_match(StarletteHeaders(raw=lines)).tags == ('"a-1"', '"a-2"', '"a-3"')
    assert if_match(WerkzeugHeaders([(k.decode(), v.decode()) for k, v in lines])).tags == ('"a-1"', '"a-2"', '"a-3"')
    with pytest.raises(ValueError, match="invalid entity tag"):
        if_match(StarletteHeaders(raw=[(b"if-match", b"*"), *lines]))


def test_what_was_read_is_a_value() -> None:
    """It can be compared, hashed, pickled and printed as the header it came from."""
    read = if_match({"If-Match": '"a-1",W/"a-2"'})
    assert pickle.loads(pickle.dumps(read)) == read
    assert len({read, IfMatch(read.tags)}) == 1
    assert str(read) == '"a-1", W/"a-2"'
