"""`python -m services.scheduler`."""

from common.service import leave, main
from services.scheduler.service import SchedulerService

leave(main("scheduler", SchedulerService))
