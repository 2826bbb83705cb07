"""The status of a call read from the text that it returned, for tools that say it in no other way.

A tool of one's own raises `ToolFault` or `ToolTimeout`, and nothing has to be guessed. This is for
tools that only give text, such as a wrapped command line or somebody else's server:
`@tool(read_status=status_from_text)`. Any function from text to status will do in its place.

A word proves nothing: search results and logs are full of errors, and "0 errors found" is good
news. So only forms count that programs use to say how *they* fared, where they say it: the fields
of a JSON object, the first or last line of a text, a line that is nothing but an exit code, or a
Python traceback. When in doubt the call is ok. Pure.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from common.trajectory import ToolStatus

LINE_CHARS_MAX = 500
"""Of a line that is looked at; what says more is no message."""
EXIT_TIMEOUT = 124
"""How timeout(1) says that it ended a command."""

_FLAGS = re.IGNORECASE
_ERROR = re.compile(
    r"""(?: # Error: …   [ERROR] …   fatal: …   error - …
            [\[<(]? (?:fatal\s+)? (?:errors?|exception|failure|failed|fatal|panic) [\]>)]?
            (?: \s*[:!] | (?<=[\]>)]) | \s[-\u2013\u2014]\s )
            (?! \s* (?:0|no|none|null|nil|false|n/?a|ok|-)\b \W* $ )
            (?! \s* (?:no|0|zero|without)\ errors?\b )
            \s* \S
            # Error 404 …   An error occurred …
          | (?:http\s+)? error \s+ \(? \d{3,5} \b
          | (?:an?\s+)? (?:\w+\s+)? error \s+
            (?:occurred|executing|calling|invoking|running|while|when) \b
          | failed \s+ with \s
            # ValueError: …
          | (?-i: (?:[A-Za-z_]\w*\.)* (?!(?:Error|Exception)\b)
              [A-Z]\w* (?:(?<=Error)|(?<=Exception)) (?: :\s+\S | :?$ ) )
       )""",
    _FLAGS | re.VERBOSE,
)
_SHELL = re.compile(
    r"""(?: (?:[^\s:][^:\n]*:\s){0,3} [^:\n]+ :\s
            (?:command\ not\ found|no\ such\ file\ or\ directory|permission\ denied|not\ found)
       | \w+: \s command\ not\ found: \s \S+
       | command\ not\ found
       | '[^']+' \s is\ not\ recognized\ as\ an\ internal\ or\ external\ command.*
       | make(?:\[\d+\])?: \s \*\*\* .*
       | (?:segmentation\ fault|bus\ error|illegal\ instruction|aborted) (?:\ \(core\ dumped\))?
       | killed
       ) \s* $""",
    _FLAGS | re.VERBOSE,
)
_SHORT_REFUSAL = re.compile(r"(?:could not|cannot|can't|unable to|failed to)\s", _FLAGS)
_TIMEOUT = re.compile(
    r"""(?!(?:no|not|never|without|0|zero)\b)
        (?:[\[<(]? error [\]>)]? :? \s+)? (?:[\w.'-]+ \s+){0,4}
        (?:timed[ ]out | time[ -]?out(?:\ (?:expired|exceeded|reached|error))?
         | (?:time\ limit|deadline)\ (?:was\ )?exceeded)
        (?: \s* [.!\])]* $ | :\s+(?!\d) | \s+ (?:after|while|waiting|of) \b | \s* \( )""",
    _FLAGS | re.VERBOSE,
)
_TIMEOUT_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?!Timeout\b)(?:\w*Time[dD]?out\w*|DeadlineExceeded\w*)(?::\s|\s*$)"
)
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\)", re.MULTILINE)
_EXIT = re.compile(
    r"""^ [^\w\n]* (?:(?:the\ )?(?:process|command|program|script|shell|job)\ )?
        (?: (?:(?:exited|finished|failed|terminated|completed|ended|returned)\ )? (?:with\ )?
            (?:a\ )? (?:non-zero\ )? (?:exit|return) [ _-]? (?:code|status|value)?
          | (?:exited|finished|failed|terminated|completed|ended) \ with\ (?:code|status)
          | exited\ with
        ) \ ?[:=]?\ ? (-?\d{1,10}) [^\w\n]* $""",
    _FLAGS | re.VERBOSE | re.MULTILINE,
)
_EMPTY = re.compile(
    r"""\W* (?: (?:no|0|zero) \s (?:\w+\s)?
              (?:results?|matches|hits|rows|documents|entries|items|records|files|output|data)
              (?:\s(?:were|was))? (?:\s(?:found|returned|matched|available))?
              (?:\s(?:for|matching|in)\s.*)?
          | nothing\ (?:was\ )?found | empty | none | null ) \W* $""",
    _FLAGS | re.VERBOSE,
)


def status_from_text(text: str) -> ToolStatus:
    """Read `ok`, `empty`, `error` or `timeout` from what a tool printed or returned as JSON."""
    text = text.strip()
    if not text:
        return ToolStatus.EMPTY
    found, value = _as_json(text)
    if found and isinstance(value, dict):
        return status_from_fields(cast("dict[str, Any]", value))
    if found and value in (None, "", []):
        return ToolStatus.EMPTY
    return _status_of_output(text)


def status_from_fields(fields: Mapping[str, Any]) -> ToolStatus:
    """Read it from the fields that programs commonly use. A timeout goes before an error."""
    if not fields:
        return ToolStatus.EMPTY
    said = {_plain(fields[key]) for key in ("status", "state", "outcome") if key in fields}
    error = next((fields[key] for key in _ERROR_FIELDS if not _means_no(fields.get(key))), None)
    code = next((fields[key] for key in _CODE_FIELDS if _is_number(fields.get(key))), 0)
    late = any(fields.get(key) is True for key in ("timed_out", "timeout", "timedOut"))
    if late or said & _TIMEOUT_WORDS or code == EXIT_TIMEOUT or _tells_timeout(error):
        return ToolStatus.TIMEOUT
    denied = any(fields.get(key) is False for key in ("success", "ok"))
    if error is not None or denied or said & _ERROR_WORDS or code:
        return ToolStatus.ERROR
    if said & _EMPTY_WORDS or any(fields.get(key) == [] for key in _RESULT_FIELDS):
        return ToolStatus.EMPTY
    return ToolStatus.OK


_ERROR_FIELDS = ("error", "errors", "exception", "is_error", "isError")
_CODE_FIELDS = ("exit_code", "exitCode", "exit_status", "returncode", "return_code")
_RESULT_FIELDS = ("results", "matches", "hits", "items")
_TIMEOUT_WORDS = {"timeout", "timedout", "deadlineexceeded"}
_ERROR_WORDS = {"error", "failed", "failure", "fail", "exception"}
_EMPTY_WORDS = {"empty", "noresults", "nomatches"}


def _status_of_output(text: str) -> ToolStatus:
    lines = [line.strip()[:LINE_CHARS_MAX] for line in text.splitlines() if line.strip()]
    ends = (lines[0], lines[-1])
    codes = [int(code) for code in _EXIT.findall(text)]
    if codes and codes[-1] == 0:
        return ToolStatus.OK
    if codes[-1:] == [EXIT_TIMEOUT] or any(map(_says_timeout, ends)):
        return ToolStatus.TIMEOUT
    if codes or _TRACEBACK.search(text) or any(_ERROR.match(e) or _SHELL.match(e) for e in ends):
        return ToolStatus.ERROR
    if len(lines) == 1 and _SHORT_REFUSAL.match(text):
        return ToolStatus.ERROR
    if len(lines) == 1 and _EMPTY.match(text):
        return ToolStatus.EMPTY
    return ToolStatus.OK


def _says_timeout(line: str) -> bool:
    return bool(_TIMEOUT.match(line) or _TIMEOUT_EXCEPTION.match(line))


def _tells_timeout(error: Any) -> bool:
    return isinstance(error, str) and _says_timeout(error[:LINE_CHARS_MAX])


def _as_json(text: str) -> tuple[bool, Any]:
    """Whether the whole text is JSON, and its value."""
    try:
        return True, json.loads(text)
    except (ValueError, RecursionError):
        return False, None


def _plain(word: Any) -> str:
    """A word without case and separators; empty when it is none."""
    return re.sub(r"[\s_-]", "", word).lower() if isinstance(word, str) else ""


def _means_no(value: Any) -> bool:
    """Whether the value of an error field says that there is none."""
    return not value or _plain(value) in ("none", "no", "null", "false", "0", "ok", "noerror")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
