"""From journaled trajectories to training sequences. Token ids go through untouched.

Which tokens are trained follows from the structure of a trajectory (prompt, then action and
observation in turn), so there is no mask that could disagree with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.config import TrainingConfig
from common.errors import LibraError
from common.messages.scheduler import GroupData, TrajectoryData
from services.trainer.advantages import group_advantages

Int32: TypeAlias = NDArray[np.int32]
Float32: TypeAlias = NDArray[np.float32]


class TrajectoryMalformed(LibraError):
    """Journaled arrays of a trajectory contradict each other."""

    def __init__(self, trajectory_id: str, reason: str) -> None:
        super().__init__(f"trajectory {trajectory_id}: {reason}")
        self.trajectory_id, self.reason = trajectory_id, reason


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One trajectory as the trainer sees it. The arrays after `tokens` have equal length."""

    tokens: Int32
    """Everything up to the last action token; what comes after it teaches nothing."""
    actions: Int32
    """Positions in `tokens` that the policy sampled; each is at least 1."""
    behaviour: Float32
    """Log-probability of each action token under the policy that sampled it."""
    versions: Int32
    """Policy version that sampled each action token."""
    advantage: float
    prompt: int
    """Number of leading tokens that precede the first turn."""


def group_sequences(group: GroupData, training: TrainingConfig) -> list[TrainingSequence]:
    """Training sequences of one group; failed trajectories and empty ones are left out.

    Raises:
        TrajectoryMalformed: packed arrays of a turn differ in length.
    """
    advantages = group_advantages(
        [t.reward if t.failure is None else None for t in group.trajectories],
        baseline=training.baseline,
        normalise_std=training.normalise_std,
        usable_min=training.group_usable_min,
    )
    return [
        sequence
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        if advantage is not None
        and (sequence := trajectory_sequence(trajectory, advantage)) is not None
    ]


def batch_sequences(
    groups: Iterable[GroupData], training: TrainingConfig
) -> list[TrainingSequence]:
    """Training sequences of a batch, group after group."""
    return [sequence for group in groups for sequence in group_sequences(group, training)]


def trajectory_sequence(trajectory: TrajectoryData, advantage: float) -> TrainingSequence | None:
    """Lay one trajectory out; None when the policy sampled nothing."""
    prompt = np.frombuffer(trajectory.prompt_tokens, np.int32)
    if not len(prompt):
        raise TrajectoryMalformed(trajectory.trajectory_id, "it has no prompt")
    pieces: list[Int32] = [prompt]
    actions: list[Int32] = []
    behaviour: list[Float32] = []
    versions: list[Int32] = []
    length = len(prompt)
    for number, turn in enumerate(trajectory.turns):
        sampled = np.frombuffer(turn.action_tokens, np.int32)
        logprobs = np.frombuffer(turn.action_logprobs, np.float32)
        version = np.frombuffer(turn.action_versions, np.int32)
        if not len(sampled) == len(logprobs) == len(version):
            reason = f"turn {number} has {len(sampled)} tokens, {len(logprobs)} log-probabilities"
            raise TrajectoryMalformed(
                trajectory.trajectory_id, f"{reason} and {len(version)} versions"
            )
        observation = np.frombuffer(turn.observation_tokens, np.int32)
        pieces += [sampled, observation]
        actions.append(np.arange(length, length + len(sampled), dtype=np.int32))
        behaviour.append(logprobs)
        versions.append(version)
        length += len(sampled) + len(observation)
    if not sum(map(len, actions)):
        return None
    positions = np.concatenate(actions)
    return TrainingSequence(
        tokens=np.concatenate(pieces)[: positions[-1] + 1],
        actions=positions,
        behaviour=np.concatenate(behaviour),
        versions=np.concatenate(versions),
        advantage=advantage,
        prompt=len(prompt),
    )


def token_weights(sequences: Sequence[TrainingSequence], average: str) -> list[float]:
    """Weight of each action token of each sequence, so that the weighted sum is the loss.

    The true totals of all `sequences` are the denominators: the loss does not depend on how the
    sequences are spread over micro-batches and ranks. `token`: every action token counts the
    same. `sequence`: every sequence counts the same.
    """
    if average == "token":
        total = sum(len(sequence.actions) for sequence in sequences)
        return [1.0 / total for _ in sequences]
    return [1.0 / (len(sequences) * len(sequence.actions)) for sequence in sequences]
