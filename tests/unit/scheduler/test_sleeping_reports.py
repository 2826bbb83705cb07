import pytest

from common.errors import Refusal, RequestRefused
from common.messages.scheduler import ReportWorker
from common.weights import NO_VERSION
from services.scheduler.reports import check_report
from services.scheduler.routing.fleet import Worker


def report(slots: int) -> ReportWorker:
    return ReportWorker(
        bucket="long",
        version=NO_VERSION,
        kv_tokens_used=0,
        kv_tokens_free=100,
        slots=slots,
        holding=[],
        decode_tokens=0,
        running=0,
        waiting=0,
    )


def test_a_worker_that_sleeps_may_have_lost_its_weights_and_one_that_offers_slots_not() -> None:
    known = Worker("peer", "long-0", version=7)
    check_report(report(slots=0), ["long"], known)
    with pytest.raises(RequestRefused) as refused:
        check_report(report(slots=8), ["long"], known)
    assert refused.value.refusal is Refusal.INVALID
