"""`python -m services.tools`."""

from functools import partial

from common.service import leave, main
from services.tools.service import ToolsService

leave(main("tools", partial(ToolsService, guarded=True)))
