from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from services.trainer.outlet import Shard, whole
from services.trainer.publish import GENERATIONS, Copier, Publisher, Segment, plan_layout

State = dict[str, torch.Tensor]


@pytest.fixture
def copier() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "b.weight": torch.randn(3, 5, generator=generator),
        "a.bias": torch.randn(7, generator=generator),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(1.5),
        "count": torch.tensor([seed], dtype=torch.int64),
    }


def publisher(directory: Path, copier: ThreadPoolExecutor, dtype: torch.dtype) -> Publisher:
    made = Publisher(directory, "run", dtype, copier)
    made.prepare(state())
    return made


def publish(made: Publisher, values: State, in_use: set[str]) -> Path:
    segment = made.choose(in_use)
    assert segment is not None
    made.start(segment, whole(values))
    made.join()
    return segment.path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_segment_is_a_safetensors_file_of_the_version(
    tmp_path: Path, copier: ThreadPoolExecutor, dtype: torch.dtype
) -> None:
    path = publish(publisher(tmp_path, copier, dtype), state(3), set())
    loaded = load_file(path)
    assert loaded.keys() == state().keys()
    for name, value in state(3).items():
        expected = value.to(dtype) if value.is_floating_point() else value
        assert torch.equal(loaded[name], expected), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_generation_is_overwritten_in_place(tmp_path: Path, copier: ThreadPoolExecutor) -> None:
    made = publisher(tmp_path, copier, torch.float32)
    paths = [publish(made, state(seed), set()) for seed in range(5)]
    assert paths == [paths[0], paths[1], paths[0], paths[1], paths[0]]
    assert load_file(paths[-1])["count"].item() == 4
    assert len(list(tmp_path.iterdir())) == GENERATIONS


def test_a_segment_in_use_is_not_chosen(tmp_path: Path, copier: ThreadPoolExecutor) -> None:
    made = publisher(tmp_path, copier, torch.float32)
    first = publish(made, state(), set())
    second = publish(made, state(), {str(first)})
    third = publish(made, state(), {str(first), str(second)})
    assert len({first, second, third}) == 3
    assert made.choose({str(first), str(second), str(third)}) is None
    assert made.choose({str(first), str(second)}) is None, "the newest is never overwritten"


def test_an_error_in_the_copy_is_raised_where_it_is_joined(
    tmp_path: Path, copier: ThreadPoolExecutor
) -> None:
    made = publisher(tmp_path, copier, torch.float32)
    segment = made.choose(set())
    assert segment is not None
    made.start(segment, whole({"unknown": torch.zeros(1)}))
    with pytest.raises(KeyError):
        made.join()


def test_segments_are_gone_after_close(tmp_path: Path, copier: ThreadPoolExecutor) -> None:
    made = publisher(tmp_path, copier, torch.float32)
    publish(made, state(), set())
    made.close()
    assert not list(tmp_path.iterdir())


def test_segments_of_a_killed_process_are_replaced(
    tmp_path: Path, copier: ThreadPoolExecutor
) -> None:
    publisher(tmp_path, copier, torch.float32)
    path = publish(publisher(tmp_path, copier, torch.float32), state(1), set())
    assert load_file(path)["count"].item() == 1


def test_tensors_are_aligned_to_their_elements() -> None:
    layout = plan_layout(state(), torch.bfloat16)
    assert all(slot.offset % slot.dtype.itemsize == 0 for slot in layout.slots)
    assert layout.slots[0].offset % 64 == 0


def test_each_rank_writes_its_rows_into_one_file(
    tmp_path: Path, copier: ThreadPoolExecutor
) -> None:
    made, expected = publisher(tmp_path, copier, torch.float32), state(3)
    segment = made.choose(set())
    assert segment is not None
    layout = plan_layout(state(), torch.float32)
    other = Copier(copier)
    for rank, copying in enumerate([made, other]):
        file = segment if not rank else Segment(segment.path, layout, create=False)
        copying.start(file, {name: half(tensor, rank) for name, tensor in expected.items()})
        copying.join()
    loaded = load_file(segment.path)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def half(tensor: torch.Tensor, rank: int) -> Shard:
    if not tensor.dim():
        return Shard(tensor)
    first = (len(tensor) + 1) // 2
    return Shard(tensor[first:], first) if rank else Shard(tensor[:first])


def test_work_after_a_copy_is_not_waited_for_by_the_next_update(
    tmp_path: Path, copier: ThreadPoolExecutor
) -> None:
    made, done = publisher(tmp_path, copier, torch.float32), Event()
    segment = made.choose(set())
    assert segment is not None
    made.start(segment, whole(state()))
    later = made.then(lambda: done.wait(5))
    made.join()
    assert not later.done()
    done.set()
    assert later.result(5)
