"""Statuses read from text: what a program says of itself counts, what it talks about does not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.trajectory import ToolStatus
from services.tools.statuses import status_from_text

SEARCH_RESULT = """\
1. Error handling in Python - a guide
   Learn how an error such as ValueError is raised and caught. Error: the most feared word.
2. TypeError - JavaScript | MDN
   The TypeError object represents an error when an operation could not be performed.
3. Why did my connection time out?
   Failed to connect? Here is how to fix a connection that timed out."""
CODE = """\
# Error: this is handled below
try:
    main()
except TimeoutError:  # the request timed out
    print("Error: timed out")
    raise SystemExit(1)
// ERROR: unreachable
"""


@pytest.mark.parametrize(
    "text",
    [
        "Hello world",
        "5",
        "0 errors found",
        "0 errors, 0 warnings",
        "No errors found.",
        "no error",
        "errors: 0",
        "Errors: none",
        "Error: None",
        "error: no errors",
        "Output: 5\nError:",
        "Build finished with 0 errors",
        "Error-free since 1999",
        "Terror: a film of 1928",
        "Exceptional: the best errors",
        "Error rate: 5 %",
        "The error was fixed.",
        "Failed tests: 0",
        "timeout = 30",
        "Timeout: 30 s is the default",
        "No timeout",
        "0 timed out",
        "exit code: 0",
        "ValueError: ignored\nProcess exited with code 0",
        "Status: 404 pages indexed",
        "status 200",
        "the exit code 1 means that nothing was found",
        "Killed by a shark, they say",
        "none of these",
        "Empty space is not empty",
        SEARCH_RESULT,
        CODE,
    ],
)
def test_text_about_errors_is_no_error(text: str) -> None:
    assert status_from_text(text) is ToolStatus.OK


@pytest.mark.parametrize(
    "text",
    [
        "Traceback (most recent call last)",
        'hi\nTraceback (most recent call last):\n  File "x.py", line 1\nValueError: bad\n',
        "Error: no such city",
        "ERROR: relation does not exist",
        "[ERROR] cannot open display",
        "Error! Wrong key.",
        "Error: not found",
        "some output\nError: out of paper",
        "fatal: not a git repository",
        "fatal error: x.h missing",
        "Error 404: Not Found",
        "HTTP Error 503",
        "An error occurred while reading",
        "Error executing tool search: bad query",
        "ValueError: bad",
        "java.lang.NullPointerException: x",
        "KeyError",
        "bash: foo: command not found",
        "bash: line 1: foo: command not found",
        "sh: 1: foo: not found",
        "zsh: command not found: foo",
        "ls: cannot access 'x': No such file or directory",
        "cat: /etc/shadow: Permission denied",
        "make: *** [Makefile:3: all] Error 2",
        "Segmentation fault (core dumped)",
        "exit code: 1",
        "partial output\n[exit code 127]",
        "Process exited with code 1",
        "Command failed with exit code 2.",
        "exit status 1",
        "returncode=-9",
        "Failed to connect to the index",
        "Could not parse the query",
    ],
)
def test_what_a_program_says_of_its_failure_is_an_error(text: str) -> None:
    assert status_from_text(text) is ToolStatus.ERROR


@pytest.mark.parametrize(
    "text",
    [
        "Timeout",
        "timed out",
        "Error: timed out",
        "Error: timeout",
        "Command timed out after 30 seconds",
        "Execution timed out.",
        "Request timed out while waiting for the index",
        "Time limit exceeded",
        "TimeoutError: 30 s",
        "subprocess.TimeoutExpired: sleep",
        "requests.exceptions.ReadTimeout: x",
        'Traceback (most recent call last):\n  File "x.py", line 1\nTimeoutError',
        "exit code: 124",
    ],
)
def test_a_time_out_is_told_from_an_error(text: str) -> None:
    assert status_from_text(text) is ToolStatus.TIMEOUT


@pytest.mark.parametrize(
    "text",
    ["", " \n", "No results found.", "0 results", "no matching documents", "Nothing found", "[]",
     "null", "None", "(empty)", "No files were found for *.rs"],
)  # fmt: skip
def test_nothing_found_is_empty(text: str) -> None:
    assert status_from_text(text) is ToolStatus.EMPTY


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ({"tool": "python", "output": "x" * 1000}, ToolStatus.OK),
        ({"error": "boom"}, ToolStatus.ERROR),
        ({"error": {"code": 7}}, ToolStatus.ERROR),
        ({"isError": True, "content": []}, ToolStatus.ERROR),
        ({"status": "failed"}, ToolStatus.ERROR),
        ({"success": False}, ToolStatus.ERROR),
        ({"stdout": "", "returncode": 1}, ToolStatus.ERROR),
        ({"status": "timed_out"}, ToolStatus.TIMEOUT),
        ({"status": "TIMEOUT", "error": "killed"}, ToolStatus.TIMEOUT),
        ({"timed_out": True, "exit_code": 1}, ToolStatus.TIMEOUT),
        ({"error": "request timed out"}, ToolStatus.TIMEOUT),
        ({"error": None, "output": "3"}, ToolStatus.OK),
        ({"error": "", "output": "3"}, ToolStatus.OK),
        ({"errors": 0}, ToolStatus.OK),
        ({"errors": [], "results": [1]}, ToolStatus.OK),
        ({"status": "ok", "log": "Error: handled"}, ToolStatus.OK),
        ({"exit_code": 0, "stderr": "ValueError: caught"}, ToolStatus.OK),
        ({"timeout": 30}, ToolStatus.OK),
        ({"status": 404}, ToolStatus.OK),
        ({"results": []}, ToolStatus.EMPTY),
        ({"status": "no_results"}, ToolStatus.EMPTY),
        ({}, ToolStatus.EMPTY),
        (5, ToolStatus.OK),
        (0, ToolStatus.OK),
        (False, ToolStatus.OK),
        (["Error: in a list"], ToolStatus.OK),
    ],
)
def test_json_says_it_with_its_fields(value: Any, status: ToolStatus) -> None:
    assert status_from_text(json.dumps(value)) is status


@given(st.text())
def test_any_text_has_one_of_four_statuses(text: str) -> None:
    possible = (ToolStatus.OK, ToolStatus.EMPTY, ToolStatus.ERROR, ToolStatus.TIMEOUT)
    assert status_from_text(text) in possible


@pytest.mark.parametrize(
    "piece", ["a ", "x: ", "[", '{"a":', "error ", "a.", "(", "timed ", "0", "(\n", "\nexit code "]
)
def test_a_long_text_of_one_kind_is_read_at_once(piece: str) -> None:
    assert status_from_text(piece * 50_000) is ToolStatus.OK
