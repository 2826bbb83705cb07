"""`python -m services.coordinator`."""

import sys

from common.service import main
from services.coordinator.service import CoordinatorService

sys.exit(main("coordinator", CoordinatorService))
