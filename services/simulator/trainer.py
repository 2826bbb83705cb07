"""The simulated trainer: takes a batch, trains as long as its tokens take, publishes, repeats."""

from collections.abc import Callable

from common.messages.scheduler import BatchOffer
from common.weights import version_id
from services.simulator.cluster import APPLY_S, TrainTimes
from services.simulator.network import Network
from services.simulator.office import Office
from services.simulator.scripts import Scripts
from services.simulator.timeline import Timeline
from services.simulator.worker import SimWorker


class SimTrainer:
    """See the module."""

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        office: Office,
        scripts: Scripts,
        times: TrainTimes,
    ) -> None:
        self.step = 0
        self.step_ended_at: list[float] = []
        self.busy_s = 0.0
        self.ended = False
        self.on_step: Callable[[int], None] | None = None
        self._timeline = timeline
        self._network = network
        self._office = office
        self._scripts = scripts
        self._times = times

    def ask(self) -> None:
        """Ask for the next batch."""
        self._timeline.after(self._network.across_s, self._office.take_batch, self._offered)

    def _offered(self, offer: BatchOffer) -> None:
        if offer.exhausted and not offer.group_ids:
            self._end()
            return
        contexts = [
            script.final_context_tokens
            for group_id in offer.group_ids
            for script in self._scripts.group(group_id)
        ]
        train_s = self._times.train_s(contexts)
        self.busy_s += train_s
        self._timeline.after(train_s, self._trained, list(offer.group_ids))

    def _trained(self, group_ids: list[str]) -> None:
        delay_s = self._network.across_s
        self._timeline.after(delay_s, self._office.step_finished, group_ids, self._recorded)

    def _recorded(self, stop: bool) -> None:  # noqa: FBT001  (called by the timeline)
        self.step += 1
        self.step_ended_at.append(self._timeline.now)
        if self.on_step is not None:
            self.on_step(self.step)
        if stop:
            self._end()
            return
        self._publish(version_id(0, self.step))
        self.ask()

    def _publish(self, version: int) -> None:
        """All workers get the version at once; each pauses while it swaps the weights in."""
        for worker in self._office.workers.values():
            self._timeline.after(self._times.publish_s, self._apply, worker, version)

    def _apply(self, worker: SimWorker, version: int) -> None:
        worker.apply_version(version, APPLY_S)

    def _end(self) -> None:
        self.ended = True
        self._timeline.stop()
