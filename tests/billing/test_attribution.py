"""End users and tags: bounded, exact as JSON, and nothing that a database could not keep."""

import pytest

from billing.attribution import TAGS_MAX, read_tags, scalar_tags, tags_text


def test_scalars_become_texts() -> None:
    found = scalar_tags({"team": "search", "n": 3, "x": 0.5, "live": True, "dry": False, "note": ""}, tags_max=6)
    assert found == {"team": "search", "n": "3", "x": "0.5", "live": "true", "dry": "false", "note": ""}
    assert read_tags(tags_text(found)) == found


@pytest.mark.parametrize(
    "wrong",
    [
        "team",
        ["team"],
        None,
        {"a": None},
        {"a": {}},
        {"a": ["b"]},
        {"": "b"},
        {"a=b": "c"},
        {"a" * 65: "b"},
        {"a": "b" * 257},
        {"a": "b\0"},
        {"a\n": "b"},
        {"a": "\ud800"},
    ],
)
def test_anything_else_is_refused_with_words(wrong: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        scalar_tags(wrong, tags_max=5)


def test_more_than_may_be_is_refused() -> None:
    assert len(scalar_tags({str(n): n for n in range(TAGS_MAX)}, tags_max=TAGS_MAX)) == TAGS_MAX
    with pytest.raises(ValueError, match="at most 5 entries"):
        scalar_tags({str(n): n for n in range(6)}, tags_max=5)


def test_the_same_tags_are_the_same_text_in_any_order() -> None:
    assert tags_text({"b": "1", "a": "2"}) == tags_text({"a": "2", "b": "1"}) == '{"a":"2","b":"1"}'
    assert tags_text({}) is None
    assert read_tags(None) == {}
