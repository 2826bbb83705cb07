"""`python -m services.coordinator`."""

from common.service import leave, main
from services.coordinator.service import CoordinatorService

leave(main("coordinator", CoordinatorService))
