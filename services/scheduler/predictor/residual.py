"""How many tokens a trajectory will still sample: the residual predictor.

It learns from finished trajectories only, and everything learned is a sum, or a sample, over
their rows (`features`): a ridge regression of log(1 + remaining) on the trajectory's own past,
then what its siblings left unexplained (`siblings`), then how errors spread (`spread`). The last
two are measured anew on the newest rows each time the regression is solved. Unfinished
trajectories are censored observations: while they are many beside the finished ones, which are
the short ones then, each counts as what it has sampled plus what is expected of it.
"""

from collections.abc import Sequence
from math import expm1, log1p
from typing import Any

import numpy as np

from services.scheduler.predictor.experts import Expert, expert
from services.scheduler.predictor.features import (
    COLUMNS,
    START,
    START_COLUMN,
    TURN_CELLS,
    Point,
    Progress,
    ToolCells,
)
from services.scheduler.predictor.live import Live
from services.scheduler.predictor.pace import solve_after
from services.scheduler.predictor.regression import Sums, regressed
from services.scheduler.predictor.rows import Batch, Ended, Kept, Ring, Rows, dense, packed, united
from services.scheduler.predictor.siblings import Siblings, Unfinished, fit, signals
from services.scheduler.predictor.spread import Spread
from services.scheduler.predictor.state import State, encode
from services.scheduler.predictor.unfinished import (
    imputed,
    location_of,
    log_turns_left,
    share_unfinished,
)
from services.scheduler.routing.route import Residual, Route

Array = np.ndarray[Any, Any]

HALF_LIFE = 200.0
"""Ticks of the clock, one per finished trajectory, after which a row counts half."""
ROWS_MAX = 16_384
"""About 2,000 trajectories of 8 turns, 2 MB: siblings are remembered for so long."""
_FIT_ROWS = 1024
"""Newest rows that the weights of siblings are fitted on."""
_SPREAD_ROWS = 320
"""Newest rows whose errors are the spread: few, so that it follows a drift."""
_LOOK_BACK_EVERY = 4
"""Solutions, once the ring is well filled: looking at all past rows costs more than they do."""
_LOOK_BACK_ROWS = 8192
"""Until so many, solutions are as rare as the rows are few, and each looks back."""
_GUESSED_SHARE = 0.05
"""Unfinished trajectories count in while they have this share of all rows ever finished: later,
those that finish are as long as those that begin."""
_GUESSED_ROWS_MAX = 512
"""Of them, an even sample of so many stands for all: solving costs the same however many there
are."""
_LOG_REMAINING_MAX = 14.0


class ResidualPredictor:
    """Implements `Predictor`.

    Age is counted by `clock`, which ticks with each trajectory that is learned. Where several
    predictors share the work, whoever drives them sets `clock` before each `end`, so that all
    count the same; then their merged sums are those of one that saw everything.
    """

    def __init__(self, *, half_life: float = HALF_LIFE, rows_max: int = ROWS_MAX) -> None:
        self.clock = 0.0
        self._sums = Sums(half_life)
        self._ring = Ring(rows_max)
        self._pending = Rows()
        self._tools = ToolCells()
        self._live: dict[str, Live] = {}
        self._unfinished: list[Live] = []
        """Those of them that have had a turn, in no order."""
        self._unfinished_rows = 0
        self._siblings: dict[str, Siblings] = {}
        self._numbered = 0
        self._points_since_solve = 0
        self._solve_soonest = 0
        """No sooner, whatever has changed since: nearly always enough to know."""
        self._weights: list[float] = [0.0] * COLUMNS
        self._version = 0
        """Of the weights."""
        self._looked = 0
        """Times that past rows were looked at anew."""
        self._counts: list[float] = [0.0] * COLUMNS
        self._trust, _ = fit(self._ring, np.zeros(0), 0, Unfinished())
        self._spread = Spread(np.zeros(0), 0.0)
        self._start_spread = self._spread
        self._expert = Expert()

    def begin(self, route: Route) -> None:
        """A trajectory was admitted, or is back with its past turns."""
        if route.trajectory_id in self._live:
            self.end(route, finished=False)
        siblings = self._family(route.task_id or route.group_id)
        live = Live(Progress(self._tools), siblings)
        self._live[route.trajectory_id] = live
        siblings.live += 1
        self._note(live, START)
        self._catch_up(live, route)
        route.siblings_at = live.seen

    def returned(self, route: Route) -> None:
        """It has one outcome more."""
        live = self._live.get(route.trajectory_id)
        if live is None:
            self.begin(route)
            return
        self._catch_up(live, route)
        if self._points_since_solve >= self._solve_soonest:
            self._settle_if_due()

    def predict(self, route: Route, *, tokens_since_return: int = 0) -> Residual:
        """Tokens still to come."""
        live = self._find(route)
        point = live.point
        location = self._location(live, point)
        if point.turn:
            spread, evidence = self._spread, self._counts[point.cells[1]]
        else:
            spread, evidence = self._start_spread, self._counts[START_COLUMN]
        if tokens_since_return > 0:
            return spread.residual_after(location, tokens_since_return, evidence)
        return spread.residual(location, evidence)

    def distribution(self, route: Route, *, tokens_since_return: int = 0) -> list[float]:
        """Equally likely numbers of tokens still to come, ascending."""
        live = self._find(route)
        point = live.point
        spread = self._spread if point.turn else self._start_spread
        return spread.remaining_after(self._location(live, point), tokens_since_return)

    def end(self, route: Route, *, finished: bool) -> None:
        """It ended; learn from it if it finished by itself."""
        live = self._find(route)
        siblings = live.siblings
        if known := self._live.pop(route.trajectory_id, None):
            self._leave(known)
            siblings.live -= 1
            siblings.log_sum -= known.log_sampled
        elif len(route.siblings_at) == len(live.seen):
            live.seen = list(route.siblings_at)
        total = route.action_tokens
        sampled = [0, *route.action_tokens_at]
        while sampled and sampled[-1] >= total:
            sampled.pop()
        if finished and 0 < len(sampled) <= self._ring.rows_max:
            self._learn(route, live, sampled)
        elif not siblings.finished and not siblings.live:
            self._siblings.pop(route.task_id or route.group_id, None)

    def _catch_up(self, live: Live, route: Route) -> None:
        """Note the turns that a living one has had since."""
        told, turns = len(live.locations), len(route.outcomes)
        for turn in range(told - 1, turns):
            self._advance(live, route, turn)
        if live.place >= 0:
            self._unfinished_rows += turns + 1 - told
        elif turns:
            live.place = len(self._unfinished)
            self._unfinished.append(live)
            self._unfinished_rows += turns + 1

    def _leave(self, live: Live) -> None:
        """It is not unfinished any more."""
        if live.place < 0:
            return
        self._unfinished_rows -= len(live.locations)
        last = self._unfinished.pop()
        if last is not live:
            last.place = live.place
            self._unfinished[last.place] = last

    def _learn(self, route: Route, live: Live, sampled: list[int]) -> None:
        """From its first points, at which it had sampled so many of its tokens."""
        task = route.task_id or route.group_id
        siblings = self._family(task)
        ring, rows, total = self._ring, len(sampled), route.action_tokens
        self.clock += 1.0
        kept, gone = ring.keep(task, rows, self.clock)
        ended = Ended(rows, total, self.clock, siblings.number)
        self._pending.append(live.rows, live.seen, ended)
        residuals, rows_max, place = ring.residuals, ring.rows_max, kept.start
        for so_far, location in zip(sampled, live.locations, strict=False):
            residuals[place % rows_max] = log1p(total - so_far) - location
            place += 1
        for old in gone:
            self._forget(old)
        siblings.add(kept, ring)
        self._points_since_solve += 1
        self._settle_if_due()

    def _forget(self, kept: Kept) -> None:
        siblings = self._siblings.get(kept.task)
        if siblings is None:
            return
        siblings.forget(kept)
        if not siblings.finished and not siblings.live:
            del self._siblings[kept.task]

    def _find(self, route: Route) -> Live:
        """The living one; made from its route if it was never begun, or its turns not told."""
        live = self._live.get(route.trajectory_id)
        if live is not None and len(live.locations) == len(route.outcomes) + 1:
            return live
        siblings = self._siblings.get(route.task_id or route.group_id) or Siblings(0)
        live = Live(Progress(self._tools), siblings)
        self._note(live, START)
        for turn in range(route.turns):
            self._advance(live, route, turn)
        siblings.log_sum -= live.log_sampled
        return live

    def _advance(self, live: Live, route: Route, turn: int) -> None:
        point = live.progress.advance(
            route.outcomes[turn], route.action_tokens_at[turn], route.context_tokens_at[turn]
        )
        self._note(live, point)

    def _note(self, live: Live, point: Point) -> None:
        live.point = point
        live.rows += packed(point)
        siblings = live.siblings
        unfinished = siblings.live - 1 if siblings.live > 0 else 0
        log_sampled = log1p(point.sampled)
        siblings.log_sum += log_sampled - live.log_sampled
        live.log_sampled = log_sampled
        ahead = (
            (siblings.log_sum - log_sampled) / unfinished - log_sampled if unfinished > 0 else 0.0
        )
        live.seen += (self.clock, unfinished, ahead)
        live.locations.append(regressed(self._weights, point))
        live.version = self._version
        self._points_since_solve += 1

    def _location(self, live: Live, point: Point) -> float:
        if live.version != self._version:
            live.locations[-1] = regressed(self._weights, point)
            live.version = self._version
        location = live.locations[-1]
        siblings = live.siblings
        if siblings.seen != self._looked:
            siblings.refresh(self._ring, self._looked)
        mean, finished, at_turn, count = siblings.means(TURN_CELLS[point.turn])
        unfinished, ahead = live.seen[-2:]
        a, b, c, d, e, f = signals(mean, finished, at_turn, count, unfinished, ahead)
        t = self._trust
        location += a * t[0] + b * t[1] + c * t[2] + d * t[3] + e * t[4] + f * t[5]
        if self._expert.share and point.turn:
            # It learns from the ended alone, which are the short ones.
            known = 1.0 - share_unfinished(self._unfinished_rows, self._sums.count)
            return self._expert.blended(point.cells, location, known * known)
        return location

    def _settle_if_due(self) -> None:
        new = self._points_since_solve
        if new >= self._solve_soonest and new >= solve_after(
            self._ring.total, self._unfinished_rows
        ):
            self._settle()

    def settle(self) -> None:
        """Take in what is pending and derive everything from the sums and the ring anew."""
        self._expert = Expert()
        self._settle()

    def _settle(self) -> None:
        self._points_since_solve = 0
        ring = self._ring
        if self._pending:
            batch = self._pending.batch()
            self._pending = Rows()
            self._sums.add(batch)
            ring.write(batch)
        guessed = self._guess()
        unfinished = Unfinished()
        if guessed is None:
            weights = self._sums.solve()
        else:
            batch = guessed.batch()
            rows = dense(batch.numbers, batch.cells)
            targets, counted = imputed(
                batch,
                rows @ np.array(self._weights),
                np.frombuffer(ring.residuals)[ring.newest(_FIT_ROWS)],
                weight=self._unfinished_rows / len(guessed),
                unsure=share_unfinished(self._unfinished_rows, self._sums.count),
            )
            rows, targets = rows[counted], targets[counted]
            weights = self._sums.solve((rows, targets), self._unfinished_rows / len(targets))
            residuals = targets - rows @ weights
            unfinished = Unfinished(self._unfinished_rows, float(residuals.mean()))
        self._weights = weights.tolist()
        self._counts = self._sums.products.diagonal().tolist()
        self._version += 1
        self._solve_soonest = solve_after(ring.total, 0)
        if not self._version % _LOOK_BACK_EVERY or ring.total < _LOOK_BACK_ROWS:
            self._look_back(weights, unfinished)

    def _look_back(self, weights: Array, unfinished: Unfinished) -> None:
        """Derive anew what past rows leave unexplained: siblings' word, and the spread."""
        ring = self._ring
        self._looked += 1
        residuals = ring.explain(weights)
        self._trust, errors = fit(ring, residuals, _FIT_ROWS, unfinished)
        errors = errors[-_SPREAD_ROWS:]
        starts = ring.cells[ring.newest(len(errors)), 0][-len(errors) :] == START_COLUMN
        trajectories = self._counts[START_COLUMN]
        if ring.total >= self._expert.outgrown:
            self._expert = expert(ring, residuals, self._sums)
        self._spread = Spread(errors[~starts], trajectories, self._expert.wider)
        self._start_spread = Spread(errors[starts], trajectories)

    def _guess(self) -> Rows | None:
        """Rows of unfinished trajectories, ended as is expected of them; an even sample."""
        unfinished, rows = self._unfinished, self._unfinished_rows
        if not rows or rows < _GUESSED_SHARE * self._ring.total:
            return None
        stride = -(-rows // _GUESSED_ROWS_MAX)
        unsure = share_unfinished(rows, self._sums.count)
        turns_left = log_turns_left(
            len(unfinished), rows - len(unfinished), self._counts[START_COLUMN], self._sums.count
        )
        guessed = Rows()
        # Another residue each time, so that all have their turn.
        for place in range(self._version % min(stride, len(unfinished)), len(unfinished), stride):
            live = unfinished[place]
            last = live.point
            location = location_of(last, regressed(self._weights, last), turns_left, unsure)
            total = last.sampled + expm1(min(max(location, 0.0), _LOG_REMAINING_MAX))
            ended = Ended(len(live.locations), total, self.clock, 0)
            guessed.append(live.rows, live.seen, ended)
        return guessed

    def merge(self, other: "ResidualPredictor") -> None:
        """Take in what another one has learned; both settle first.

        Both must have counted by one clock, and no prompt may be split between them. Then this
        one knows what one would know that had learned everything, in whatever order.
        """
        self.settle()
        state = State(other.dump())
        self.clock = max(self.clock, state.clock)
        self._sums.merge(state.sums(self._sums.half_life))
        self._fill(*united((self._ring.kept, self._ring.batch()), (state.kept, state.batch)))

    def dump(self) -> bytes:
        """All that was learned."""
        self.settle()
        return encode(self._sums, self._ring, self.clock)

    def load(self, dumped: bytes) -> None:
        """Take over what `dump` gave, in place of what was learned here.

        Raises:
            ValueError: it is of something else, or of another version.
        """
        state = State(dumped)
        self.clock = state.clock
        self._sums = state.sums(self._sums.half_life)
        self._pending = Rows()
        self._fill(state.kept, state.batch)

    def _fill(self, trajectories: Sequence[Kept], batch: Batch) -> None:
        """Begin a new ring with the newest of whole trajectories that fit, and settle."""
        ring = self._ring = Ring(self._ring.rows_max)
        skipped, rows = 0, len(batch.targets)
        while rows > ring.rows_max:
            rows -= trajectories[skipped].rows
            skipped += 1
        for siblings in self._siblings.values():
            siblings.clear()
        groups: list[int] = []
        for task, _, count, clock in trajectories[skipped:]:
            kept, _ = ring.keep(task, count, clock)
            siblings = self._family(task)
            siblings.queue(kept)
            groups.extend([siblings.number] * count)
        newest = Batch(*(column[len(column) - rows :] for column in batch))
        ring.write(newest._replace(groups=np.array(groups, np.int64)))
        self._siblings = {t: s for t, s in self._siblings.items() if s.finished or s.live}
        self.settle()

    def _family(self, task: str) -> Siblings:
        siblings = self._siblings.get(task)
        if siblings is None:
            self._numbered += 1
            siblings = self._siblings[task] = Siblings(self._numbered)
        return siblings
