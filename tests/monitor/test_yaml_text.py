"""YAML that is written by us reads back as what was written."""

import yaml
from hypothesis import given
from hypothesis import strategies as st

from decodescope.monitor.yaml_text import COMMENT, commented, yaml_text

ONE_LINE = st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="\ufeff\ufffe\uffff")
SCALARS = st.booleans() | st.integers() | st.text(ONE_LINE, max_size=20)
KEYS = st.from_regex(r"[a-z_]{2,8}x", fullmatch=True)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=20)


@given(VALUES)
def test_any_value_reads_back(value):
    assert yaml.safe_load(yaml_text(value)) == value


def test_a_comment_says_something_and_changes_nothing():
    text = yaml_text([{COMMENT: "why", "alert": "Name"}])
    assert "# why" in text
    assert yaml.safe_load(text) == [{"alert": "Name"}]


@given(VALUES)
def test_what_is_commented_out_says_nothing(value):
    assert yaml.safe_load(commented(yaml_text(value))) is None


def test_words_that_yaml_takes_for_something_else_are_quoted():
    for word in ("yes", "Off", "null", "1", "1.5", "12:30", "1e3", "", " x", "a: b", "#x", "{}", "'", "~"):
        assert yaml.safe_load(yaml_text({"k": word})) == {"k": word}
