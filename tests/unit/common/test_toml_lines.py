import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.toml_lines import KeyPath, locate
from common.toml_write import dump

TEXT = """\
# a comment = "[not a table]"
title = "x # y"   # tail
a.b."c d" = 1
"quo ted" = 'lit'

[run]
name = ~~~
several = 1
[lines]
~~~
seed = 3

[[buckets]]
name = "short"
cpus = [
  [0],  # first ] core
  [1, 2],
]

[[buckets]]
name = "long"
[buckets.inner]
deep = { x = 1, y = { z = [1, 2] }, "w" = "}" }

[[buckets.inner.more]]
k = 1979-05-27 07:32:00
[[buckets.inner.more]]
k = '''a''''
last = true""".replace("~~~", '"""')


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 1),
        (("title",), 2),
        (("a",), 3),
        (("a", "b", "c d"), 3),
        (("quo ted",), 4),
        (("run",), 6),
        (("run", "name"), 7),
        (("run", "seed"), 11),
        (("buckets", 0), 13),
        (("buckets", 0, "cpus", 0), 16),
        (("buckets", 0, "cpus", 1, 1), 17),
        (("buckets", 1, "name"), 21),
        (("buckets", 1, "inner", "deep", "y", "z", 1), 23),
        (("buckets", 1, "inner", "deep", "w"), 23),
        (("buckets", 1, "inner", "more", 0, "k"), 26),
        (("buckets", 1, "inner", "more", 1, "last"), 29),
    ],
)
def test_a_key_is_found_on_its_line(path: tuple[str | int, ...], line: int) -> None:
    tomllib.loads(TEXT)
    assert locate(TEXT)[path] == line


def test_windows_line_ends_count_once() -> None:
    assert locate("a = 1\r\nb = 2\r\n")[("b",)] == 2


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
LISTS = st.recursive(
    st.lists(SCALARS, max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=4
)
TABLES = st.recursive(
    st.dictionaries(KEYS, SCALARS | LISTS, max_size=3),
    lambda inner: st.dictionaries(
        KEYS, inner | st.lists(inner, min_size=1, max_size=3), max_size=3
    ),
)


def paths(value: object, path: KeyPath = ()) -> set[KeyPath]:
    """Every path at which something stands in data that tomllib has read."""
    if isinstance(value, dict):
        inner = [*value.items()]
    else:
        inner = [*enumerate(value)] if isinstance(value, list) else []
    return {path}.union(*(paths(v, (*path, k)) for k, v in inner))


def test_every_value_of_a_hand_written_file_is_located() -> None:
    assert set(locate(TEXT)) == paths(tomllib.loads(TEXT))


@given(TABLES)
def test_every_value_of_any_written_file_is_located(data: dict[str, Any]) -> None:
    text = dump(data)
    assert tomllib.loads(text) == data
    assert set(locate(text)) == paths(data)
