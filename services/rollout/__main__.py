"""`python -m services.rollout`."""

from common.service import leave, main
from services.rollout.service import RolloutService

leave(main("rollout", RolloutService))
