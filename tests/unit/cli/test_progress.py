import io

from rich.console import Console

from common.messages.coordinator import SlotStatus
from common.messages.scheduler import RunStatus, WorkerStatus
from services.cli.progress import Progress, clock, spark


def status(step: int, reward: float = 0.5) -> RunStatus:
    return RunStatus(
        step=step,
        steps_max=10,
        lineage=0,
        version=step,
        trajectories={"running": 3, "waiting": 0},
        groups={"ready": 1},
        workers=[
            WorkerStatus(
                name="short-0",
                bucket="short",
                version=step,
                holding=3,
                kv_tokens_used=100,
                kv_tokens_free=900,
                decode_tokens=5,
            )
        ],
        last_metrics={
            "reward/mean": reward,
            "throughput/tokens_per_s": 1234.0,
            "idle/rollout": 0.4,
        },
        waiting_for="2 groups",
    )


def test_the_remaining_time_follows_the_pace_of_the_steps_so_far() -> None:
    progress = Progress("demo", started_s=0.0)
    progress.note(status(1), now=30.0)
    assert progress.eta_s(status(1), now=30.0) is None
    progress.note(status(3), now=50.0)
    assert progress.eta_s(status(3), now=50.0) == 70.0


def test_the_table_shows_what_a_person_asks_for() -> None:
    progress = Progress("demo", started_s=0.0)
    progress.note(status(4, reward=0.25), now=1.0)
    console = Console(record=True, width=120, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(progress.table(status(4, reward=0.25), now=61.0))
    shown = capture.get()
    for expected in (
        "4 / 10",
        "0.250",
        "running 3",
        "short-0",
        "1:01",
        "2 groups",
        "1,234",
        "rollout 40%",
    ):
        assert expected in shown


def test_before_the_first_status_the_table_says_that_it_starts() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(Progress("demo", started_s=0.0).table(None, now=5.0))
    assert "starting" in capture.get()


def test_a_step_is_one_line_elsewhere() -> None:
    progress = Progress("demo", started_s=0.0)
    assert not progress.note(status(0), now=0.0)
    assert progress.note(status(1), now=1.0)
    assert progress.line(status(1), now=2.0).startswith("step 1/10  reward 0.500")


def test_a_sparkline_spans_zero_to_one() -> None:
    assert spark([0.0, 1.0]) == "▁█"
    assert clock(125) == "2:05"


def test_the_table_says_whose_each_hybrid_slot_is() -> None:
    times = {"drain_s": 0.0, "release_s": 0.0, "load_s": 0.0}
    states = [("long-0", "train", "active"), ("long-1", "rollout", "loading")]
    slots = [
        SlotStatus(slot=slot, side=side, phase=phase, phase_s=3.0, fence=1, switches=1, **times)
        for slot, side, phase in states
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    shown = status(1).model_copy(update={"slots": slots})
    console.print(Progress("demo", started_s=0.0).table(shown, now=1.0))
    assert "long-0 train  long-1 rollout (loading 3 s)" in console.export_text()
