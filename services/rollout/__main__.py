"""`python -m services.rollout`."""

import sys

from common.service import main
from services.rollout.service import RolloutService

sys.exit(main("rollout", RolloutService))
