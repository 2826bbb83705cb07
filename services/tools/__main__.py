"""`python -m services.tools`."""

import sys
from functools import partial

from common.service import main
from services.tools.service import ToolsService

sys.exit(main("tools", partial(ToolsService, guarded=True)))
