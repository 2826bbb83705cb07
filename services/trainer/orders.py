"""How rank 0 tells the other ranks what to do: values of a few bytes or a batch, over a pipe."""

from collections.abc import Mapping, Sequence
from typing import IO, Any

import msgpack
import numpy as np

from services.trainer.batch import TrainingSequence

COPIED, FAILED = b"\x01", b"\x00"
"""What a child tells of a copy; the end of its pipe tells that it is gone."""


def packed(sequence: TrainingSequence) -> list[Any]:
    """A sequence as values that msgpack carries."""
    arrays = (sequence.tokens, sequence.actions, sequence.behaviour, sequence.versions)
    return [*(array.tobytes() for array in arrays), sequence.advantage, sequence.prompt]


def unpacked(fields: Sequence[Any]) -> TrainingSequence:
    """Inverse of `packed`."""
    tokens, actions, behaviour, versions, advantage, prompt = fields
    return TrainingSequence(
        tokens=np.frombuffer(tokens, np.int32),
        actions=np.frombuffer(actions, np.int32),
        behaviour=np.frombuffer(behaviour, np.float32),
        versions=np.frombuffer(versions, np.int32),
        advantage=advantage,
        prompt=prompt,
    )


def write(pipe: IO[bytes], value: Mapping[str, Any]) -> None:
    """Send one value."""
    payload = msgpack.packb(value)
    pipe.write(len(payload).to_bytes(8, "little") + payload)
    pipe.flush()


def read(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next value, or None when the writer is gone."""
    length = int.from_bytes(pipe.read(8), "little")
    payload = pipe.read(length)
    return msgpack.unpackb(payload) if length and len(payload) == length else None
