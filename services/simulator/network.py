"""The simulated network: how long a message takes from one node to another."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """Latency inside a node and between two."""

    same_node_s: float = 0.0001
    """One small message between two processes of one node, handling included."""
    across_s: float = 0.0003

    def latency_s(self, node: int, other: int) -> float:
        """Of one message."""
        return self.same_node_s if node == other else self.across_s
