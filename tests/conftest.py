"""What every test run shares. `HYPOTHESIS_PROFILE` names another Hypothesis profile."""

import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

# Set before anything imports a library that would look for a model on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

# An engine that is killed leaves its sockets in the temporary directory, so tests have one of
# their own. What pytest keeps for people to look at stays where it always is.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
SCRATCH = tempfile.mkdtemp(prefix="libra-tests-")
os.environ["TMPDIR"] = tempfile.tempdir = SCRATCH


def pytest_unconfigure() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)


settings.register_profile("dev", max_examples=100, deadline=None)
settings.register_profile("ci", max_examples=300, deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "soak", max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)
