import pytest

from common.errors import Refusal, RequestRefused
from common.weights import NO_VERSION
from services.scheduler.reports import check_report
from services.scheduler.routing.fleet import Worker
from tests.support.scheduling import make_report


def test_a_worker_that_sleeps_may_have_lost_its_weights_and_one_that_offers_slots_not() -> None:
    known = Worker("peer", "short-0", version=7)
    check_report(make_report([], version=NO_VERSION, slots=0), ["short"], known)
    with pytest.raises(RequestRefused) as refused:
        check_report(make_report([], version=NO_VERSION, slots=8), ["short"], known)
    assert refused.value.refusal is Refusal.INVALID
