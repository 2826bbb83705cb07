"""Who a process is on the mesh: run id, role, name, and a random incarnation.

The incarnation makes a restarted process a new peer, so nothing that was meant for the old one
reaches it. The run id keeps two runs on one host apart.
"""

import re
import secrets
from dataclasses import dataclass

from common.errors import ProtocolError

INCARNATION_BYTES = 6
"""48 random bits: a run would need millions of restarts of one name before two collide."""
PART_CHARS_MAX = 60
"""Four parts and a connection number have to fit into the 255 bytes of a ZeroMQ routing id."""

_PART = re.compile(rf"[A-Za-z0-9._-]{{1,{PART_CHARS_MAX}}}")


@dataclass(frozen=True)
class Identity:
    """One incarnation of one process. Its text form is `run_id/role/name/incarnation`."""

    run_id: str
    role: str
    name: str
    incarnation: str

    def __post_init__(self) -> None:
        for part in (self.run_id, self.role, self.name, self.incarnation):
            assert _PART.fullmatch(part), f"{part!r} cannot be a part of an identity"

    def __str__(self) -> str:
        return f"{self.run_id}/{self.role}/{self.name}/{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> "Identity":
        """Read the text form.

        Raises:
            ProtocolError: the text is no identity.
        """
        parts = text.split("/")
        if len(parts) != 4 or not all(_PART.fullmatch(part) for part in parts):
            raise ProtocolError(text[:100], "not an identity (run_id/role/name/incarnation)")
        return cls(*parts)


def new_identity(run_id: str, role: str, name: str) -> Identity:
    """Make the identity of a process that starts now."""
    return Identity(run_id, role, name, secrets.token_hex(INCARNATION_BYTES))
