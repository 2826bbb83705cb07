"""What a finished trajectory teaches, as bytes, and such bytes as records of a log.

A record is its length, a checksum and the route. The first one that is not whole ends the log: a
kill or a full disk has torn it, and nothing behind it was ever said to be kept.
"""

from collections.abc import Iterator
from struct import Struct
from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest

from common.trajectory import ToolStatus
from services.scheduler.routing.outcomes import Payload, ToolOutcome
from services.scheduler.routing.route import Route

HEAD = Struct("<IQ")
"""Length of what follows, and its xxh3."""

_STATUS = {status.value: status for status in ToolStatus}
_PAYLOAD = {payload.value: payload for payload in Payload}


def encode(route: Route) -> bytes:
    """A finished route as a record."""
    lesson = msgpack.packb(
        (
            route.trajectory_id,
            route.group_id,
            route.task_id,
            route.prompt_tokens,
            route.action_tokens,
            route.observation_tokens,
            route.outcomes,
            route.action_tokens_at,
            route.context_tokens_at,
            route.siblings_at,
        )
    )
    return HEAD.pack(len(lesson), xxh3_64_intdigest(lesson)) + lesson


def decode(log: bytes) -> Iterator[Route]:
    """The routes of all records up to the first that is torn or damaged.

    Raises:
        ValueError: there is one, or one of another version; after all before it.
    """
    at = 0
    while at < len(log):
        lesson = _lesson(log, at)
        yield _route(lesson)
        at += HEAD.size + len(lesson)


def _lesson(log: bytes, at: int) -> bytes:
    torn = ValueError(f"damaged from byte {at} of {len(log)} on")
    if at + HEAD.size > len(log):
        raise torn
    length, digest = HEAD.unpack_from(log, at)
    lesson = log[at + HEAD.size : at + HEAD.size + length]
    if len(lesson) < length or xxh3_64_intdigest(lesson) != digest:
        raise torn
    return lesson


def _route(lesson: bytes) -> Route:
    try:
        route = _unpacked(msgpack.unpackb(lesson))
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"a record of another version ({error!r})") from error
    if not len(route.outcomes) == len(route.action_tokens_at) == len(route.context_tokens_at):
        raise ValueError("a record that contradicts itself")
    return route


def _unpacked(fields: list[Any]) -> Route:
    trajectory_id, group_id, task_id, prompt, action, observation, outcomes, *at = fields
    return Route(
        trajectory_id,
        group_id,
        task_id,
        prompt_tokens=prompt,
        action_tokens=action,
        observation_tokens=observation,
        outcomes=[
            ToolOutcome(tool, _STATUS[status], _PAYLOAD[payload], tokens, latency_s)
            for tool, status, payload, tokens, latency_s in outcomes
        ],
        action_tokens_at=at[0],
        context_tokens_at=at[1],
        siblings_at=at[2],
    )
