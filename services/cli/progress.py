"""What a person sees while a job runs: a live table on a terminal, a line per step elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.messages.coordinator import SlotStatus
from common.messages.scheduler import RunStatus

SPARKS = "▁▂▃▄▅▆▇█"
REWARDS_SHOWN = 40


@dataclass
class Progress:
    """Turns successive statuses into something to look at. Time comes from the caller."""

    name: str
    started_s: float
    rewards: list[float] = field(default_factory=list[float])
    first_step_s: float | None = None
    first_step: int = 0
    step: int = -1

    def note(self, status: RunStatus, now: float) -> bool:
        """Take in a new status; True when a step has ended since the last one."""
        if status.step == self.step:
            return False
        ended = self.step >= 0 or status.step > 0
        self.step = status.step
        if status.step > 0:
            self.rewards.append(status.last_metrics.get("reward/mean", 0.0))
            if self.first_step_s is None:
                self.first_step_s, self.first_step = now, status.step
        return ended

    def eta_s(self, status: RunStatus, now: float) -> float | None:
        """Seconds until the last step at the pace so far; None before two steps."""
        if self.first_step_s is None or status.step <= self.first_step:
            return None
        pace = (now - self.first_step_s) / (status.step - self.first_step)
        return pace * max(0, status.steps_max - status.step)

    def line(self, status: RunStatus, now: float) -> str:
        """One step as one line."""
        metrics = status.last_metrics
        eta = self.eta_s(status, now)
        return (
            f"step {status.step}/{status.steps_max}"
            f"  reward {metrics.get('reward/mean', 0.0):.3f}"
            f"  staleness {metrics.get('staleness/mean', 0.0):.2f}"
            f" (max {metrics.get('staleness/max', 0.0):.0f})"
            f"  {metrics.get('throughput/tokens_per_s', 0.0):,.0f} tok/s"
            f"  {metrics.get('time/step', 0.0):.1f} s"
            f"  elapsed {clock(now - self.started_s)}"
            + (f"  left {clock(eta)}" if eta is not None else "")
        )

    def table(self, status: RunStatus | None, now: float) -> RenderableType:
        """The live view."""
        if status is None:
            return Text(f"{self.name}: starting, {clock(now - self.started_s)}", style="dim")
        metrics = status.last_metrics
        eta = self.eta_s(status, now)
        head = Table.grid(padding=(0, 2))
        head.add_row("[b]step[/b]", f"{status.step} / {status.steps_max}", bar(status))
        head.add_row("[b]reward[/b]", f"{metrics.get('reward/mean', 0.0):.3f}", spark(self.rewards))
        head.add_row(
            "[b]staleness[/b]",
            f"{metrics.get('staleness/mean', 0.0):.2f}",
            f"at most {metrics.get('staleness/max', 0.0):.0f} steps",
        )
        head.add_row(
            "[b]tokens/s[/b]",
            f"{metrics.get('throughput/tokens_per_s', 0.0):,.0f}",
            f"{metrics.get('time/step', 0.0):.1f} s a step",
        )
        head.add_row("[b]trajectories[/b]", "", counts(status.trajectories))
        head.add_row("[b]groups[/b]", "", counts(status.groups))
        if status.slots:
            head.add_row("[b]slots[/b]", "", "  ".join(map(describe_slot, status.slots)))
        head.add_row("[b]idle[/b]", "", idle(metrics))
        head.add_row(
            "[b]time[/b]",
            clock(now - self.started_s),
            f"about {clock(eta)} left" if eta is not None else "",
        )
        if status.waiting_for:
            head.add_row("[b]waits for[/b]", "", Text(status.waiting_for, style="dim"))
        return Group(Text(f"libra · {self.name}", style="bold cyan"), head, workers(status))


def workers(status: RunStatus) -> Table:
    """The rollout workers and what they hold."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("worker", "bucket", "version", "holding", "KV used", "KV free"):
        table.add_column(column, justify="left" if column in ("worker", "bucket") else "right")
    for worker in status.workers:
        table.add_row(
            worker.name,
            worker.bucket,
            str(worker.version),
            str(worker.holding),
            f"{worker.kv_tokens_used:,}",
            f"{worker.kv_tokens_free:,}",
        )
    return table


def describe_slot(slot: SlotStatus) -> str:
    """`long-0 train`, and the phase where it is not there yet."""
    text = f"{slot.slot} {slot.side}"
    return text if slot.phase == "active" else f"{text} ({slot.phase} {slot.phase_s:.0f} s)"


def bar(status: RunStatus, width: int = 40) -> str:
    """Share of the steps that are done."""
    filled = round(width * status.step / max(1, status.steps_max))
    return f"[cyan]{'━' * filled}[/cyan][dim]{'━' * (width - filled)}[/dim]"


def spark(values: list[float]) -> str:
    """The last rewards as a sparkline between 0 and 1."""
    shown = values[-REWARDS_SHOWN:]
    top = max([1.0, *shown])
    return "".join(SPARKS[round(max(0.0, value) / top * (len(SPARKS) - 1))] for value in shown)


def idle(metrics: Mapping[str, float]) -> str:
    """`rollout 40%  trainer 3%`, of the last step."""
    shares = {name: share for name, share in metrics.items() if name.startswith("idle/")}
    return "  ".join(f"{name.removeprefix('idle/')} {share:.0%}" for name, share in shares.items())


def counts(by_state: Mapping[str, int]) -> str:
    """`running 12  ready 3`, without the zeros."""
    return "  ".join(f"{state} {count}" for state, count in by_state.items() if count)


def clock(seconds: float) -> str:
    """`m:ss`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
