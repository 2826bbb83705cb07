"""`python -m services.coordinator`."""

from common.service import leave, main
from services.coordinator.service import streaming

leave(main("coordinator", streaming))
