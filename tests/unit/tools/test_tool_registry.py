"""A target is loaded, or refused with the author's file and line."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from services.tools.registry import load_target

SERVER = """
from services.tools.sdk import Environment, tool
from services.tools.builtin.calculator import Calculator

class Echo(Environment):
    name = "echo"
    def reset(self, task): return task["question"]
    @tool
    def say(self, text: str) -> str:
        '''Say it.'''
        return text
    def grade(self, trajectory): return 1.0
"""


def refusal(target: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_target(target)
    return str(refused.value)


def written(directory: Path, text: str, name: str = "server.py") -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


def test_a_file_serves_the_environments_that_it_defines(tmp_path: Path) -> None:
    offer = load_target(written(tmp_path, SERVER))
    assert {name: sorted(tools) for name, tools in offer.tools.items()} == {"echo": ["say"]}


def test_a_module_serves_its_environments() -> None:
    offer = load_target("services.tools.builtin.calculator")
    assert list(offer.environments) == ["calculator"]


def test_all_names_what_is_served(tmp_path: Path) -> None:
    offer = load_target(written(tmp_path, SERVER + "\n__all__ = ['Echo', 'Calculator']\n"))
    assert sorted(offer.environments) == ["calculator", "echo"]


def test_a_file_can_import_its_neighbours(tmp_path: Path) -> None:
    written(tmp_path, "LIMIT = 3\n", "neighbour_of_a_server.py")
    text = "from neighbour_of_a_server import LIMIT\n" + SERVER
    assert load_target(written(tmp_path, text)).environments


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("\n\n1 / 0\n", 3, "cannot be imported: ZeroDivisionError: division by zero"),
        ("\nimport no_such_module_anywhere\n", 2, "No module named 'no_such_module_anywhere'"),
        ("\n\n\ndef (", 4, "SyntaxError"),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
        ("import json\n\njson.loads('')\n", 3, "JSONDecodeError"),
        (SERVER.replace("text: str", "text"), 8, "parameter 'text' has no type hint"),
        (SERVER.replace("def grade", "def judge"), 5, "Echo has no grade()"),
        (SERVER + SERVER.replace("class Echo", "class Ohce"), 17, "'echo' is also Echo"),
    ],
)
def test_an_import_failure_names_file_line_and_reason(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = written(tmp_path, text)
    told = refusal(path)
    assert told.startswith(f"{path}:{line}: ")
    assert message in told
    assert len(told.splitlines()) == 1


def test_a_target_that_is_not_there_is_named() -> None:
    assert "there is no such file" in refusal("nowhere/server.py")
    assert "there is no Python module 'nowhere'" in refusal("nowhere.server")


def test_a_file_without_environments_is_told_what_to_write(tmp_path: Path) -> None:
    assert "define a subclass of" in refusal(written(tmp_path, "x = 1\n"))
    functions = "from services.tools.sdk import tool\n@tool\ndef f(a: str):\n    '''Do.'''\n"
    assert "its tools need one" in refusal(written(tmp_path, functions))
