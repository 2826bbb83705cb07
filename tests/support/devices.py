"""The devices that the two tenants of a hybrid slot hand to each other."""


class Devices:
    """Of one slot. Whoever takes them while another has them fails the test."""

    def __init__(self) -> None:
        self.holder: str | None = None
        self.history: list[str] = []

    def take(self, role: str) -> None:
        assert self.holder in (None, role), f"{role} takes what {self.holder} holds"
        if self.holder != role:
            self.history.append(role)
        self.holder = role

    def free(self, role: str) -> None:
        if self.holder == role:
            self.holder = None
