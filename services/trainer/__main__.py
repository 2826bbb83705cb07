"""`python -m services.trainer`."""

import sys

from common.service import main
from services.trainer.service import TrainerService

sys.exit(main("trainer", TrainerService))
