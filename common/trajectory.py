"""Tokens as they travel and rest: packed little-endian arrays, never lists.

A turn is what the policy sampled (action tokens, with a log-probability and a policy version
each) and then what the environment appended (observation tokens). Which tokens are trained is
therefore structure, not a mask that could disagree with it.
"""

import sys
from array import array
from collections.abc import Iterable
from enum import StrEnum

assert sys.byteorder == "little", "packed arrays are little-endian; this host is not"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as little-endian int32."""
    return array("i", token_ids).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Inverse of `pack_tokens`; also used for versions."""
    values = array("i")
    values.frombytes(packed)
    return values.tolist()


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Pack log-probabilities as little-endian float32."""
    return array("f", logprobs).tobytes()


def token_count(packed: bytes) -> int:
    """Number of 4-byte elements in a packed array."""
    return len(packed) // 4


class StopReason(StrEnum):
    """Why a trajectory ended. All of these can be graded; failures are `FailureKind`."""

    ANSWERED = "answered"
    """The model ended its turn without a tool call."""
    TURNS_MAX = "turns_max"
    TOKENS_MAX = "tokens_max"
    """A turn or the whole trajectory reached its token limit."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next turn would not fit into the model's context."""
    ENVIRONMENT = "environment"
    """The environment said the episode is over."""


class FailureKind(StrEnum):
    """Why there is no reward. Never the policy's doing, never trained, always counted."""

    TOOL = "tool"
    """A tool server was lost, or answered what is not an answer."""
    GRADER = "grader"
    """The grader raised, hung or returned what is not a reward."""
    ENGINE = "engine"
    ENVIRONMENT = "environment"
    """The environment could not be reset for this task."""
    WORKER_LOST = "worker_lost"
    """Placed again and again, and each worker died."""


class ToolStatus(StrEnum):
    """Typed outcome of one tool call."""

    OK = "ok"
    EMPTY = "empty"
    """The tool worked and found nothing."""
    ERROR = "error"
    """The tool refused or failed because of what the model asked for. The model sees it."""
    MALFORMED = "malformed"
    """The call could not be parsed or names no tool. The model sees it."""
    TIMEOUT = "timeout"
    """The call, as the model made it, did not end within its limit. The model sees it."""
    INFRASTRUCTURE = "infrastructure"
    """Our failure: the sandbox, the server or the network. Ends the trajectory as a failure."""
