"""`python -m services.scheduler`."""

from common.blas import use_one_thread

use_one_thread()

from common.service import leave, main  # noqa: E402
from services.scheduler.service import SchedulerService  # noqa: E402

leave(main("scheduler", SchedulerService))
