"""Placement by expected cost: where a trajectory ends soonest and costs the others least.

For each worker in question the cost is, in seconds,

    tokens still to come × (urgency × its own time per token + what each token costs the others)
    + what the move costs: the transfer or the recompute, and for the latter the others' delay

with the tokens from the predictor, the times from the speeds measured per bucket at the worker's
present load, and a surcharge where the cache gets tight. A worker whose cache is used or spoken
for beyond `kv_high` is closed until that has fallen to `kv_low`: preemption is avoided, not
suffered. No clock, no I/O; equal inputs give equal decisions.
"""

import json
from math import exp
from operator import itemgetter
from typing import NamedTuple

from services.scheduler.routing.fleet import Fleet, Terms
from services.scheduler.routing.moving import MoveCosts
from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.policy import (
    Decision,
    MoveMeasure,
    Option,
    Predictor,
    TurnMeasure,
)
from services.scheduler.routing.route import Residual, Route
from services.scheduler.routing.speeds import Speeds
from services.scheduler.routing.standing import (
    GROWTH_SHARE,
    PRESSED_BY,
    PRESSED_FROM,
    Standing,
    Standings,
)

FORMAT = b"libra-routing-1\n"
PATIENCE_S = 60.0
"""One that has waited for so long may go to a closed worker, as long as it is not really full."""
URGENCY = 1.0
"""Extra weight of the own time of a trajectory whose life, so far and still to come, is as long as
the mean; it grows with the cube of that length: whole groups are trained, and whoever is oldest
or longest is whom the trainer will wait for. Without it up to 8 % less is sampled…"""
URGENCY_LONGEST = 16.0
"""…up to so many times the mean."""
SHARE_FROM = 1e-3
"""Below, one is gone so soon that it meets the batch as it is."""
STEP_GUESS_S = 0.03
"""Seconds per token before any turn, to compare time that has passed with tokens to come."""
MEAN_WEIGHT = 0.02
"""Of the newest in the running means of tokens, prompts and observations."""
HABIT_TOKENS = 200.0
"""A trajectory's own observations per sampled token count fully beyond so many sampled."""


COST = itemgetter(1)
"""Of an option. Sorting is stable: at equal cost it stays, or takes the first bucket."""


class Need(NamedTuple):
    """What one trajectory asks of a worker from now on."""

    tokens: float
    """Still to sample, expected."""
    context: int
    """Tokens that its next turn starts from."""
    held: float
    """KV tokens that it holds, on average until its end."""
    end: int
    """Context that it is expected to end with."""
    end_high: float
    """Context that it ends with nine times out of ten, or less."""
    urgency: float
    """Weight of its own time against that of others."""


class Libra:
    """See the module."""

    def __init__(self, params: RoutingParams, predictor: Predictor) -> None:
        self._params = params
        self._predictor = predictor
        self._speeds = Speeds()
        self._moves = MoveCosts()
        self._standings = Standings(params, self._speeds)
        self._life_mean = 0.0
        """At a decision: tokens still to come, and those that the time so far was worth; 0 before
        the first."""
        self._step_s = STEP_GUESS_S
        """Seconds per token, over all turns."""
        self._prompt_mean = 0.0
        self._observed_mean = 0.0
        """Observation tokens per sampled one, over trajectories."""
        self._homes: dict[str, tuple[str, int]] = {}
        """By group: the worker that got its last trajectory, and how many are alive."""

    # ── what happens ─────────────────────────────────────────────────────────────────────────

    def begin(self, route: Route) -> None:
        self._predictor.begin(route)
        peer, alive = self._homes.get(route.group_id, (route.worker, 0))
        self._homes[route.group_id] = (peer, alive + 1)

    def end(self, route: Route, *, finished: bool) -> None:
        self._predictor.end(route, finished=finished)
        peer, alive = self._homes.get(route.group_id, ("", 1))
        if alive > 1:
            self._homes[route.group_id] = (peer, alive - 1)
        else:
            self._homes.pop(route.group_id, None)
        if finished and route.action_tokens:
            ratio = route.observation_tokens / route.action_tokens
            self._observed_mean += MEAN_WEIGHT * (ratio - self._observed_mean)
            self._prompt_mean += MEAN_WEIGHT * (route.prompt_tokens - self._prompt_mean)

    def turn_measured(self, measure: TurnMeasure) -> None:
        self._speeds.turn_measured(measure)
        if measure.action_tokens > 1:
            step_s = measure.decode_s / (measure.action_tokens - 1)
            self._step_s += MEAN_WEIGHT * (step_s - self._step_s)
        if measure.running:
            self._standings.requests_seen(measure.peer, measure.running)

    def move_measured(self, measure: MoveMeasure) -> None:
        self._moves.move_measured(measure)

    # ── decisions ────────────────────────────────────────────────────────────────────────────

    def place(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        self._standings.follow(fleet)
        residual = self._params.possible(self._predictor.predict(route), route)
        return self._place(route, self._need(route, residual, terms.now), residual, terms)

    def returned(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        self._predictor.returned(route)
        self._standings.follow(fleet)
        residual = self._params.possible(self._predictor.predict(route), route)
        need = self._need(route, residual, terms.now)
        here = self._standings.by_peer.get(route.worker)
        if here is None or here.worker.draining or here.worker.slots == 0:
            decision = self._place(route, need, residual, terms)
            return None if decision is None else decision._replace(reason="draining")
        stay = Option(here.peer, need.tokens * self._token_s(need, here, joins=False), 0.0)
        if route.moves >= self._params.moves_max:
            return Decision(here.peer, "moves", residual, (stay,), need.end)
        enough_s = stay.cost_s * (1 - self._params.move_saving_min)
        options = [stay]
        for bucket in self._standings.buckets:
            there = bucket.better(terms, here) if bucket is here.bucket else bucket.best(terms)
            if there is not None:
                options.append(self._weigh_move(need, here, there, enough_s))
        options.sort(key=COST)
        best = options[0]
        if best is stay:
            return Decision(here.peer, "best", residual, tuple(options), need.end)
        if best.cost_s > enough_s:
            return Decision(here.peer, "margin", residual, tuple(options), need.end)
        return Decision(best.peer, "cheaper", residual, tuple(options), need.end)

    def _place(self, route: Route, need: Need, residual: Residual, terms: Terms) -> Decision | None:
        home = self._home(route, terms)
        options = [] if home is None else [self._weigh(need, home, shared=True)]
        for bucket in self._standings.buckets:
            there = bucket.best(terms)
            if there is not None and there is not home:
                options.append(self._weigh(need, there, shared=False))
        if not options:
            return self._place_old(route, need, residual, terms)
        options.sort(key=COST)
        peer = options[0].peer
        _, alive = self._homes.get(route.group_id, ("", 0))
        if alive:
            self._homes[route.group_id] = (peer, alive)
        reason = "sibling" if home is not None and peer == home.peer else "cheapest"
        return Decision(peer, reason, residual, tuple(options), need.end)

    def _place_old(
        self, route: Route, need: Need, residual: Residual, terms: Terms
    ) -> Decision | None:
        """All that may be used is closed: only one that has waited for long is let in."""
        if terms.now - route.waiting_since < PATIENCE_S:
            return None
        fitting = [
            standing
            for standing in self._standings.by_peer.values()
            if standing.worker.takes(terms)
            and standing.worker.context_tokens + need.context
            <= self._params.kv_high * standing.kv_tokens
        ]
        if not fitting:
            return None
        there = min(fitting, key=lambda standing: (standing.share, standing.peer))
        option = self._weigh(need, there, shared=False)
        return Decision(there.peer, "waited", residual, (option,), need.end)

    def _home(self, route: Route, terms: Terms) -> Standing | None:
        """The worker of the last sibling, while it holds one and may be given another."""
        peer, _ = self._homes.get(route.group_id, ("", 0))
        home = self._standings.by_peer.get(peer)
        if home is None or home.closed or route.group_id not in home.worker.groups:
            return None
        return home if home.worker.takes(terms) else None

    # ── costs ────────────────────────────────────────────────────────────────────────────────

    def _need(self, route: Route, residual: Residual, now: float) -> Need:
        most = self._params.context_tokens_max
        tokens = max(1.0, residual.mean)
        whole = tokens + (now - route.waiting_since) / self._step_s
        if self._life_mean:
            self._life_mean += MEAN_WEIGHT * (whole - self._life_mean)
        else:
            self._life_mean = whole
        sampled, observed = route.action_tokens, route.observation_tokens
        context = route.prompt_tokens + sampled + observed or round(self._prompt_mean)
        growth = 1 + (observed + self._observed_mean * HABIT_TOKENS) / (sampled + HABIT_TOKENS)
        end = min(context + tokens * growth, most)
        end_high = min(context + residual.p90 * growth, most)
        longer = min(whole / self._life_mean, URGENCY_LONGEST)
        return Need(
            tokens, context, (context + end) / 2, int(end), end_high, 1 + URGENCY * longer**3
        )

    def _weigh_move(self, need: Need, here: Standing, there: Standing, enough_s: float) -> Option:
        """What it costs to go there. Where that is too much without the move, it is left out."""
        run_s = need.tokens * self._token_s(need, there, joins=True)
        if run_s > enough_s:
            return Option(there.peer, run_s, 0.0)
        prefill_s = there.bucket.time.prefill_token_s
        move = self._moves.cheaper(here.bucket.name, there.bucket.name, need.context, prefill_s)
        move_s = move.seconds * need.urgency
        if move.path == "recompute":
            move_s += move.seconds * there.running
        return Option(there.peer, run_s + move_s, move_s)

    def _weigh(self, need: Need, there: Standing, *, shared: bool) -> Option:
        """Place it where nothing of it is; `shared` when its siblings' prompt is there."""
        move_s = 0.0
        if not shared:
            prefill_s = need.context * there.bucket.time.prefill_token_s
            move_s = prefill_s * (need.urgency + there.running)
        run_s = need.tokens * self._token_s(need, there, joins=True)
        return Option(there.peer, run_s + move_s, move_s)

    def _token_s(self, need: Need, standing: Standing, *, joins: bool) -> float:
        """Seconds that one of its tokens costs there, itself and all others together."""
        _, context, held, end, end_high, urgency = need
        _, per_request_s, per_kv_token_s, _ = standing.bucket.time
        step_s, spoken = standing.step_s, standing.spoken
        running, brim = standing.running, PRESSED_FROM * standing.kv_tokens
        own = (per_request_s + per_kv_token_s * held) * standing.slower
        if joins:
            step_s += own
            spoken += context + GROWTH_SHARE * (end - context)
            # The mean will do while there is room; near the brim the bad case counts.
            if spoken > brim:
                spoken += GROWTH_SHARE * (end_high - end)
        else:
            running -= standing.bucket.duty
        worker, growth = standing.worker, end - context
        others = len(worker.routes) - (not joins)
        others_growth = worker.kv_expected - worker.context_tokens - (0 if joins else growth)
        share = _share(growth * others, others_growth)
        alone_s = standing.bucket.time.fixed_s * standing.slower + own
        if step_s > alone_s:
            step_s = alone_s + (step_s - alone_s) * share
        cost_s = urgency * step_s + running * share * own
        if spoken > brim:
            pressed = (spoken - brim) / standing.kv_tokens
            cost_s *= 1 + PRESSED_BY * pressed * pressed
        return cost_s

    # ── memory ───────────────────────────────────────────────────────────────────────────────

    def dump(self) -> bytes:
        learned = {
            "speeds": self._speeds.dump(),
            "moves": self._moves.dump(),
            "means": [self._life_mean, self._step_s, self._prompt_mean, self._observed_mean],
        }
        return FORMAT + json.dumps(learned).encode() + b"\n" + self._predictor.dump()

    def load(self, dumped: bytes) -> None:
        if not dumped:
            return
        if not dumped.startswith(FORMAT):
            raise ValueError("this is not the memory of the libra policy of this version")
        line, _, rest = dumped[len(FORMAT) :].partition(b"\n")
        learned = json.loads(line)
        self._speeds.load(learned["speeds"])
        self._moves.load(learned["moves"])
        means = learned["means"]
        self._life_mean, self._step_s, self._prompt_mean, self._observed_mean = means
        self._predictor.load(rest)


def _share(growth: float, others_growth: float) -> float:
    """Of the present batch, what one meets there on average until its own end.

    The others leave one by one; with lives that end at random, a share of (1 - exp(-x)) / x of
    them is there on average, x being its own growth over the mean of theirs. So the longest are
    judged by a batch that will soon be small.

    Args:
        growth: its own, times the number of the others.
        others_growth: theirs in all.
    """
    x = growth / max(1.0, others_growth)
    return (1 - exp(-x)) / x if x > SHARE_FROM else 1.0
