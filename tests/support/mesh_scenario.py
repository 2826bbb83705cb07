"""One busy scenario on a faulty simulated network; `python -m tests.support.mesh_scenario SEED`
prints the digest of what happened."""

import asyncio
import sys
from dataclasses import dataclass, field

from common.clock import run_sim
from common.errors import TransportError
from common.mesh import Mesh
from common.messages.base import Message, Request
from common.transport.sim import Faults, SimNetwork

FAULTY = Faults(loss=0.2, duplicate=0.2, delay_s=(0.001, 0.2), reorder=0.3)


class Noted(Message):
    """Answers `Note`."""

    times: int
    """How often this note was executed."""


class Note(Request[Noted]):
    """Asks to note something down."""

    text: str
    slow: bool


@dataclass
class Notebook:
    """Counts how often each note was executed."""

    times: dict[str, int] = field(default_factory=dict[str, int])

    async def note(self, sender: str, request: Note) -> Noted:
        if request.slow:
            await asyncio.sleep(0.3)
        self.times[request.text] = self.times.get(request.text, 0) + 1
        return Noted(times=self.times[request.text])

    def note_at_once(self, sender: str, request: Note) -> Noted:
        self.times[request.text] = self.times.get(request.text, 0) + 1
        return Noted(times=self.times[request.text])


async def insist(mesh: Mesh, peer: str, request: Note, *, key: str, tries: int = 100) -> Noted:
    """Ask with the same key until there is an answer."""
    for _ in range(tries):
        try:
            return await mesh.request(peer, request, timeout_s=1.0, key=key)
        except TransportError:
            continue
    raise AssertionError(f"no answer to {key} in {tries} tries")


async def busy(network: SimNetwork) -> Notebook:
    """Three writers insist on twenty notes each."""
    notebook = Notebook()
    async with Mesh(network.connect("notebook")) as server, asyncio.TaskGroup() as tasks:
        server.serve(Note, notebook.note)

        async def write(name: str) -> None:
            async with Mesh(network.connect(name)) as writer:
                peer = await writer.connect(server.address, timeout_s=10)
                async with asyncio.TaskGroup() as notes:
                    for number in range(20):
                        request = Note(text=f"{name}-{number}", slow=number % 2 == 0)
                        notes.create_task(insist(writer, peer, request, key=request.text))

        for name in ("ann", "ben", "cem"):
            tasks.create_task(write(name))
    return notebook


def digest(seed: int) -> str:
    """Hash of the trace."""
    network = SimNetwork(seed, FAULTY)
    run_sim(busy(network))
    return network.digest()


if __name__ == "__main__":
    sys.stdout.write(digest(int(sys.argv[1])))
