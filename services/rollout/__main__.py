"""`python -m services.rollout`."""

from common.service import leave, main
from services.rollout.service import mirroring

leave(main("rollout", mirroring))
