"""The loader refuses what it does not know, at its line, and reads nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config, Section
from common.config_load import load_config, table_at
from common.errors import ConfigError
from common.toml_write import dump, to_toml

MINIMAL: dict[str, Any] = {
    "run": {"name": "demo", "max_steps": 4},
    "model": {"path": "models/tiny", "context_tokens": 512},
    "tasks": {"path": "tasks.jsonl"},
    "buckets": [{"name": "short"}, {"name": "long"}],
    "tools": [{"name": "calculator", "target": "services.tools.builtin.calculator"}],
}

TABLES = ["run", "model", "tasks", "sampling", "rollout", "scheduler", "training", "coordinator"]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def full() -> dict[str, Any]:
    """Every key of the configuration, with a value that is not a default's absence."""
    return Config.model_validate(MINIMAL).model_dump(mode="json")


def keys() -> list[tuple[str | int, ...]]:
    """The path of every documented key, of sections too."""
    found: list[tuple[str | int, ...]] = []
    for section, value in full().items():
        found.append((section,))
        path = (section, 0) if isinstance(value, list) else (section,)
        found += [(*path, key) for key in table_at((section,)).model_fields]
    return found


def edits(name: str) -> list[str]:
    """One letter less, one more, one other, in the middle of the name."""
    at = len(name) // 2
    return [
        name[:at] + name[at + 1 :],
        name[:at] + "q" + name[at:],
        name[:at] + "q" + name[at + 1 :],
    ]


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return list(caught.value.problems)


@pytest.mark.parametrize("key", keys(), ids=lambda key: ".".join(map(str, key)))
@pytest.mark.parametrize("edit", range(3))
def test_a_one_letter_edit_of_any_key_is_refused_at_its_line(
    key: tuple[str | int, ...], edit: int, tmp_path: Path
) -> None:
    data = full()
    table: Any = data
    for part in key[:-1]:
        table = table[part]
    right = str(key[-1])
    wrong = edits(right)[edit]
    table[wrong] = table.pop(right)
    path = write(tmp_path, dump(data))
    where = ".".join(map(str, (*key[:-1], wrong)))
    (line, *more) = problems(path)
    match = re.fullmatch(rf"{re.escape(str(path))}:(\d+): {where}: unknown key; (.*)", line)
    assert match, line
    assert wrong in path.read_text().splitlines()[int(match[1]) - 1]
    assert match[2] == f"did you mean '{right}'?"
    assert not more, "the key that was meant is not reported as missing too"


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
[run]
name = "My Run"
max_steps = "40"
[model]
path = "m"
context_tokens = 512.0
dtype = "bfloat61"
[tasks]
[sampling]
top_p = 0.9
temperature = nan
group_size = 8
[[buckets]]
name = "short"
slots = 0
workers = true
[training]
zzz = 1
betas = [0.9]
[tools]
name = "x"
""",
    )
    known = ", ".join(table_at(("training",)).model_fields)
    assert [line.removeprefix(f"{path}:") for line in problems(path)] == [
        (
            '2: run.name: "My Run" (a string) cannot name anything; use lower-case letters, '
            "digits, - and _, at most 41, beginning with a letter or digit"
        ),
        '3: run.max_steps: expected an integer, got "40" (a string); write it without quotes',
        (
            '7: model.dtype: got "bfloat61" (a string); write "float32" or "bfloat16" '
            "(did you mean 'bfloat16'?)"
        ),
        "6: model.context_tokens: expected an integer, got 512.0; write the value in that form",
        "8: tasks.path: is missing and has no default; add it",
        "11: sampling.temperature: nan is not finite; give a finite number",
        (
            "10: sampling.top_p: does not exist on purpose: a cut distribution biases the loss; "
            "remove it"
        ),
        "12: sampling.group_size: unknown key here; it belongs into [training]",
        "16: buckets.0.workers: expected an integer, got true; write the value in that form",
        "15: buckets.0.slots: 0 is out of range; use at least 1",
        "19: training.betas.1: is missing and has no default; add it",
        f"18: training.zzz: unknown key; known here: {known}",
        "20: tools: expected a list, got a table; write [ … ], or [[table]] for a list of tables",
    ]


def test_a_number_is_never_read_from_a_string(tmp_path: Path) -> None:
    for section in TABLES:
        for key, value in full()[section].items():
            if isinstance(value, bool | int | float):
                data = full()
                data[section][key] = str(value)
                path = write(tmp_path, dump(data))
                assert "expected" in problems(path)[0]


def test_broken_toml_is_reported_at_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[run]\nname = demo\n")
    assert problems(path)[0].startswith(f"{path}:2: not TOML: Invalid value; ")
    path = write(tmp_path, "[run]\nname = [1,\n")
    assert problems(path)[0].startswith(f"{path}:2: not TOML: ")
    path = write(tmp_path, "[run]\n[run]\n")
    assert problems(path)[0].startswith(f"{path}:2: not TOML: Cannot declare")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "no such file" in problems(tmp_path / "absent.toml")[0]
    assert "cannot be read" in problems(tmp_path)[0]
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"a = 1\nb = \xff\n")
    assert problems(binary) == [f"{binary}:2: not UTF-8; save the file as UTF-8 text"]


def test_overrides_are_toml_values_or_bare_strings(tmp_path: Path) -> None:
    path = write(tmp_path, dump(MINIMAL))
    config = load_config(
        path,
        [
            "run.name=other",
            'model.path="some dir"',
            "tasks.path=a/b.jsonl",
            "run.max_steps=7",
            "training.learning_rate = 1e-4",
            "training.betas=[0.8, 0.9]",
            "buckets.0.workers=2",
            "buckets.long.workers=3",
            "tools.calculator={name='renamed', target='x'}",
            "rollout.tool_format=tags",
        ],
    )
    assert (config.run.name, config.run.max_steps) == ("other", 7)
    assert (config.model.path, config.tasks.path) == ("some dir", "a/b.jsonl")
    assert (config.training.learning_rate, config.training.betas) == (1e-4, (0.8, 0.9))
    assert [bucket.workers for bucket in config.buckets] == [2, 3]
    assert config.tools[0].name == "renamed"
    assert config.rollout.tool_format == "tags"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("run.xname=x", "run.xname: unknown key; did you mean 'name'?"),
        ("rnu.name=x", "rnu: unknown key; did you mean 'run'?"),
        ("run.max_steps=ten", 'run.max_steps: expected an integer, got "ten" (a string)'),
        ("run.name=7", "run.name: expected a string, got 7; put it in quotes"),
        ("run=7", "run: expected a table, got 7"),
        ("run.max_steps", "not an assignment; write section.key=value"),
        ("=3", "not an assignment; write section.key=value"),
        ("run.max_steps=", "the value is missing"),
        ("training.betas=[1", "[1 is no TOML value; close quotes and brackets"),
        ("run.name.first=x", "run.name is a value, not a table; set run.name itself"),
        ("buckets.medium.slots=2", "no entry of buckets is called 'medium'; there are short, long"),
        ("buckets.2.slots=2", "no entry of buckets is called '2'; there are short, long"),
        ("buckets.long.slotz=2", "buckets.1.slotz: unknown key; did you mean 'slots'?"),
        ("training.group_size=1", "training.group_size: a group of 1"),
        ("model.context_tokens=40000", "training.micro_batch_tokens: a trajectory of"),
        ("run.seed=1\nrun.max_steps=2", "run.seed: expected an integer"),
        ("model.path=''", "model.path: is empty; give it a value or remove the key"),
        ("buckets=[]", "buckets: is empty; give it a value or remove the key"),
        ("buckets.0.cpus=[[]]", "buckets.0.cpus.0: is empty"),
        ("training.betas=[0.1, 0.2, 0.3]", "training.betas: got a list: Tuple should have at most"),
        ("run.name=2026-01-01", "run.name: expected a string, got 2026-01-01; put it in quotes"),
        ("training.learning_rate=0", "training.learning_rate: 0 is out of range; use more than 0"),
        ("run.seed=2147483648", "run.seed: 2147483648 is out of range; use at most 2147483647"),
    ],
)
def test_a_wrong_override_is_quoted(override: str, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, dump(MINIMAL))
    assert problems(path, override)[0].startswith(f"override '{override}': {problem}")


def test_an_override_is_not_blamed_for_a_table_that_it_only_adds_to(tmp_path: Path) -> None:
    data = {name: value for name, value in MINIMAL.items() if name != "run"}
    path = write(tmp_path, dump(data))
    assert problems(path, "model.dtype=float32") == [
        f"{path}:1: run: is missing and has no default; add it"
    ]
    assert problems(path, "model.dtype=float32", "run.name=x") == [
        "override 'run.name=x': run.max_steps: is missing and has no default; add it"
    ]


def test_environment_variables_configure_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, dump(MINIMAL))
    before = load_config(path)
    for name in ("RUN_NAME", "LIBRA_RUN_NAME", "LIBRA_RUN__NAME", "run.name", "NAME"):
        monkeypatch.setenv(name, "from-the-environment")
    assert load_config(path) == before


def test_the_resolved_configuration_names_every_key(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, dump(MINIMAL)))
    written = to_toml(config)
    for key in keys():
        assert str(key[-1]) in written
    assert load_config(write(tmp_path, written)) == config


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
COUNTS = st.integers(1, 2**31 - 1)


@given(
    path=TEXTS,
    seed=st.integers(0, 2**31 - 1),
    rate=st.floats(min_value=1e-30, max_value=1.0),
    cpus=st.lists(st.lists(st.integers(0, 500), min_size=1), max_size=3),
    unsafe=st.booleans(),
    timeout_s=st.one_of(st.integers(1, 99), st.floats(1e-6, 99)),
)
def test_what_is_written_loads_as_it_was(
    path: str,
    seed: int,
    rate: float,
    cpus: list[list[int]],
    unsafe: bool,
    timeout_s: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    data = full()
    data["model"]["path"] = path
    data["run"]["seed"] = seed
    data["training"]["learning_rate"] = rate
    data["buckets"][0] |= {"cpus": cpus, "workers": len(cpus) or 1}
    data["tools"][0]["unsafe"] = unsafe
    data["rollout"]["tool_timeout_s"] = timeout_s
    config = Config.model_validate(data)
    file = write(tmp_path_factory.getbasetemp(), to_toml(config))
    assert load_config(file) == config


def test_sections_are_frozen_and_closed() -> None:
    for model in (Config, *Section.__subclasses__()):
        assert model.model_config.get("frozen")
        assert model.model_config.get("extra") == "forbid"
        assert model.model_config.get("strict")


def test_a_key_that_needs_quotes_is_written_with_them(tmp_path: Path) -> None:
    data = full() | {"a b": {'"': 1}}
    assert problems(write(tmp_path, dump(data)))[0].endswith(f"known here: {', '.join(full())}")
