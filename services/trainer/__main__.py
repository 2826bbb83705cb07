"""`python -m services.trainer`."""

from common.service import leave, main
from services.trainer.service import TrainerService

leave(main("trainer", TrainerService))
