"""`python -m services.scheduler`."""

import sys

from common.service import main
from services.scheduler.service import SchedulerService

sys.exit(main("scheduler", SchedulerService))
