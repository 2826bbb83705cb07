from services.rollout.accounting import Accounting


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_live_requests_hold_their_context_and_their_tokens() -> None:
    accounting = Accounting(100, Clock())
    accounting.begin("a", 30)
    accounting.begin("b", 10)
    accounting.sampled("a", 5)
    load = accounting.load()
    assert (load.kv_tokens_used, load.kv_tokens_free) == (45, 55)
    assert (load.running, load.waiting) == (1, 1)


def test_what_ended_holds_nothing_and_stays_counted() -> None:
    accounting = Accounting(100, Clock())
    accounting.begin("a", 30)
    accounting.sampled("a", 5)
    accounting.end("a")
    load = accounting.load()
    assert (load.kv_tokens_used, load.kv_tokens_free, load.running, load.waiting) == (0, 100, 0, 0)
    assert load.decode_tokens == 5


def test_more_than_the_cache_holds_leaves_nothing_free() -> None:
    accounting = Accounting(10, Clock())
    accounting.begin("a", 30)
    assert accounting.load().kv_tokens_free == 0


def test_busy_is_the_time_in_which_something_was_live() -> None:
    clock = Clock()
    accounting = Accounting(100, clock)
    for name, begin_s, end_s in (("a", 1.0, 3.0), ("b", 10.0, 11.0)):
        clock.now_s = begin_s
        accounting.begin(name, 1)
        clock.now_s = end_s
        accounting.end(name)
    accounting.begin("c", 1)
    clock.now_s = 15.0
    assert accounting.load().busy_s == 2.0 + 1.0 + 4.0


def test_a_request_waits_until_it_is_in_the_batch() -> None:
    accounting = Accounting(100, Clock())
    accounting.begin("a", 30)
    assert accounting.load().waiting == 1
    accounting.started("a")
    accounting.started("over already")
    load = accounting.load()
    assert (load.running, load.waiting) == (1, 0)


def test_times_are_weighed_with_what_was_held_then() -> None:
    clock = Clock()
    accounting = Accounting(100, clock)
    for now_s, change in enumerate(
        (
            lambda: accounting.begin("a", 10),
            lambda: accounting.started("a"),
            lambda: accounting.begin("b", 20),
            lambda: accounting.sampled("b", 5),
            lambda: accounting.end("a"),
            lambda: accounting.end("b"),
        )
    ):
        clock.now_s = float(now_s)
        change()
    clock.now_s = 100.0
    load = accounting.load()
    assert load.busy_s == 5.0
    assert load.running_s == 0 + 1 + 1 + 2 + 1
    assert load.kv_tokens_used_s == 10 + 10 + 30 + 35 + 25
