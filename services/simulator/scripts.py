"""What each trajectory of a run will do, fixed before any policy decides anything.

The book names groups by task, epoch and attempt. The script of a group depends on the place of its
task in the order of admission alone, so every policy meets the same trajectories.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from services.scheduler.tasks import TaskOrder
from services.simulator.traces import TraceTrajectory, TraceTurn


class Workload(Protocol):
    """Where trajectories come from."""

    @property
    def group_size(self) -> int:
        """Trajectories of one group."""
        ...

    def group(self, index: int, step: int) -> Sequence[TraceTrajectory]:
        """The trajectories of the group at that place of the order, at that step of training."""
        ...


@dataclass(slots=True, eq=False)
class Script:
    """What one trajectory of the book does."""

    trajectory_id: str
    group_id: str
    trace: TraceTrajectory
    final_context_tokens: int
    output_left: tuple[int, ...]
    """Tokens sampled from turn k on, the turn included; one more entry, 0, for the end."""
    context_at: tuple[int, ...]
    """Context that turn k starts from, and, last, the one at the end."""

    @classmethod
    def of(cls, trajectory_id: str, group_id: str, trace: TraceTrajectory) -> "Script":
        """Sum up a trace. What its last turn got back, nothing is sampled after: it is left out."""
        context, contexts, left = trace.prompt_tokens, list[int](), [0]
        for turn in trace.turns:
            contexts.append(context)
            context += turn.output_tokens + turn.observation_tokens
        context -= trace.turns[-1].observation_tokens
        for turn in reversed(trace.turns):
            left.append(left[-1] + turn.output_tokens)
        return cls(
            trajectory_id,
            group_id,
            trace,
            context,
            tuple(reversed(left)),
            (*contexts, context),
        )


def cut(trace: TraceTrajectory, context_tokens_max: int) -> TraceTrajectory:
    """The trajectory as a model with so long a context plays it: it ends where nothing more fits.

    A prompt that leaves no room is cut, too, so that any recording can be played.
    """
    if trace.context_tokens <= context_tokens_max:
        return trace
    prompt = min(trace.prompt_tokens, context_tokens_max // 2)
    context, kept = prompt, list[TraceTurn]()
    for turn in trace.turns:
        output = min(turn.output_tokens, context_tokens_max - context)
        context += output + turn.observation_tokens
        if output < turn.output_tokens or context >= context_tokens_max:
            kept.append(TraceTurn(output, "", None, 0, None))
            break
        kept.append(turn)
    return replace(trace, prompt_tokens=prompt, turns=tuple(kept))


class Scripts:
    """All scripts of a run, made when first asked for."""

    def __init__(
        self,
        workload: Workload,
        order: TaskOrder,
        *,
        groups_per_step: int,
        context_tokens_max: int,
    ) -> None:
        self.cut = 0
        """Trajectories that were too long for the context."""
        self._workload = workload
        self._context_tokens_max = context_tokens_max
        self._groups_per_step = groups_per_step
        self._place_of = {order.at(place)[1]: place for place in range(order.length)}
        self._scripts: dict[str, Script] = {}
        self._groups: dict[str, list[str]] = {}

    def of(self, trajectory_id: str) -> Script:
        """The script of a trajectory that the book has admitted."""
        script = self._scripts.get(trajectory_id)
        if script is None:
            self._make(trajectory_id.rpartition(".")[0])
            script = self._scripts[trajectory_id]
        return script

    def group(self, group_id: str) -> list[Script]:
        """The scripts of a group, in order."""
        if group_id not in self._groups:
            self._make(group_id)
        return [self._scripts[trajectory_id] for trajectory_id in self._groups[group_id]]

    def _make(self, group_id: str) -> None:
        place = self._place_of[group_id.split(".", 1)[0]]
        traces = self._workload.group(place, place // self._groups_per_step)
        ids = [f"{group_id}.{number}" for number in range(self._workload.group_size)]
        self._groups[group_id] = ids
        for number, trajectory_id in enumerate(ids):
            recorded = traces[number % len(traces)]
            trace = cut(recorded, self._context_tokens_max)
            self.cut += trace is not recorded
            self._scripts[trajectory_id] = Script.of(trajectory_id, group_id, trace)

    def forget(self, group_id: str) -> None:
        """The group has ended; its scripts are needed no more."""
        for trajectory_id in self._groups.pop(group_id, ()):
            del self._scripts[trajectory_id]
