import tomllib

import pytest

from common.toml_lines import locate

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


def test_every_value_that_tomllib_reads_is_located() -> None:
    def paths(value: object, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
        inner = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        return {path}.union(*(paths(v, (*path, k)) for k, v in inner))

    assert paths(tomllib.loads(TEXT)) == set(locate(TEXT))
