"""Prints which files and functions have grown long: places to look at, not failures."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FILE_LINES = 400
FUNCTION_LINES = 70


def long_things() -> Iterator[str]:
    for package in ("common", "services"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text, name = path.read_text(), path.relative_to(ROOT)
            if (lines := text.count("\n")) > FILE_LINES:
                yield f"{name}: {lines} lines"
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    if lines > FUNCTION_LINES:
                        yield f"{name}:{node.lineno}: {node.name} has {lines} lines"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in long_things():
        terminalreporter.write_line(f"long: {line}")
