"""Structured logs: JSON lines in files, readable lines on a terminal. Never token text."""

import logging
import sys
from pathlib import Path
from typing import Any, TextIO

import structlog


def configure_logs(service: str, worker: str, *, level: str = "INFO") -> None:
    """Send events to stderr and bind who logs to every one of them.

    The launcher redirects stderr to `logs/<worker>.log`; a person at a terminal gets columns.
    """
    pretty = sys.stderr.isatty()
    renderer: Any = (
        structlog.dev.ConsoleRenderer()
        if pretty
        else structlog.processors.JSONRenderer(default=_render)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.WriteLoggerFactory(file=_flushing(sys.stderr)),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, worker=worker)


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, for the message that says why a process ended."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _flushing(stream: TextIO) -> TextIO:
    stream.reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    return stream


def _render(value: object) -> str:
    return str(value)
