"""What a worker may say of itself. Policies reckon with it, so nonsense must not reach them."""

from collections.abc import Collection

from common.errors import Refusal, RequestRefused
from common.messages.scheduler import ReportWorker
from common.weights import NO_VERSION
from services.scheduler.routing.fleet import Worker

COUNT_MAX = 2**63 - 1
VERSION_MAX = 2**31 - 1


def check_report(report: ReportWorker, buckets: Collection[str], known: Worker | None) -> None:
    """Refuse a report that cannot be true.

    Args:
        report: what the worker says.
        buckets: names of those that the scheduler's configuration has.
        known: what is known of the worker so far.

    Raises:
        RequestRefused: `INVALID`, with what is wrong.
    """
    problem = _problem(report, buckets, known)
    if problem:
        raise RequestRefused(Refusal.INVALID, problem)


def _problem(report: ReportWorker, buckets: Collection[str], known: Worker | None) -> str:
    counts = (
        report.slots,
        report.kv_tokens_used,
        report.kv_tokens_free,
        report.decode_tokens,
        report.running,
        report.waiting,
    )
    if buckets and report.bucket not in buckets:
        there_are = ", ".join(buckets)
        return f"no bucket is called {report.bucket!r}; the scheduler's run has {there_are}"
    if min(counts) < 0 or max(counts) > COUNT_MAX:
        return "a count is negative or too large"
    if not NO_VERSION <= report.version <= VERSION_MAX:
        return f"{report.version} is no version"
    lost = report.version == NO_VERSION and known is not None and known.version != NO_VERSION
    if lost and report.slots:  # Without slots it sleeps.
        return "it had weights and says that it has none"
    return ""
