"""A weight version as the engines read it: tensors of a mapped and checked segment."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from common.digests import digest_of, hash_pieces
from common.messages.coordinator import Manifest
from common.segment import MappedSegment

if TYPE_CHECKING:
    import torch

SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Segment(MappedSegment):
    """A segment whose tensors an engine loads."""

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Each tensor as a view of the mapping, which the views keep alive."""
        import torch

        for tensor in self.mapped_tensors():
            spec = tensor.spec
            dtype = getattr(torch, SAFETENSORS_DTYPES[spec.dtype])
            flat = (
                torch.frombuffer(tensor.content, dtype=dtype)  # pyright: ignore[reportUnknownMemberType]
                if spec.length
                else torch.empty(0, dtype=dtype)
            )
            yield spec.name, flat.view(spec.shape)


def open_checked(manifest: Manifest) -> Segment:
    """Map a segment and check all of it, before anything is done with its bytes."""
    segment = Segment.open(manifest)
    segment.check()
    return segment


@dataclass(frozen=True, slots=True)
class Copied:
    """A version in memory of its own, right to the last bit."""

    header: bytes
    tensors: "dict[str, torch.Tensor]"


def copy_checked(manifest: Manifest) -> Copied:
    """Copy all tensors of a segment, and check it after that.

    A writer that comes too early is found out: what was copied was still right afterwards.
    """
    segment = Segment.open(manifest)
    copies = {name: tensor.clone() for name, tensor in segment.tensors()}
    copied = Copied(segment.header(), copies)
    segment.check()
    return copied


def held_digest(manifest: Manifest, header: bytes, held: "Mapping[str, torch.Tensor]") -> str:
    """The digest that the version would have if its file were made of these tensors.

    Equal to the manifest's when they are what was published: to be asked of what a model holds
    after a swap. Runs at memory speed: call it in a thread.
    """
    specs = sorted(manifest.tensors, key=lambda spec: spec.offset)
    pieces = (_bytes_of(held[spec.name]) for spec in specs)
    chunks = hash_pieces(chain([memoryview(header)], pieces), manifest.chunk_bytes)
    return digest_of(manifest.tensors, chunks)


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return flat.numpy().data  # pyright: ignore[reportUnknownMemberType]
