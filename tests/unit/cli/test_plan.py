import json

import pytest

from common.config import (
    BucketConfig,
    Config,
    ModelConfig,
    RunConfig,
    TasksConfig,
    ToolServerConfig,
)
from services.cli.children import failure_detail
from services.cli.plan import (
    FAILED_MAX,
    GRACE_S,
    KILLED_MAX,
    STOP_ORDER,
    AfterExit,
    after_exit,
    describe_end,
    processes,
    spread_cores,
)


def config(*buckets: BucketConfig) -> Config:
    return Config(
        run=RunConfig(name="r", max_steps=1),
        model=ModelConfig(path="m", context_tokens=64),
        tasks=TasksConfig(path="t.jsonl"),
        buckets=list(buckets) or [BucketConfig(name="short"), BucketConfig(name="long")],
        tools=[ToolServerConfig(name="calculator", target="x")],
    )


def test_every_worker_of_every_bucket_is_a_process_of_its_own() -> None:
    specs = processes(config(BucketConfig(name="short", workers=2), BucketConfig(name="long")))
    assert [spec.name for spec in specs] == [
        "coordinator",
        "scheduler",
        "calculator",
        "short-0",
        "short-1",
        "long-0",
        "trainer",
    ]


def test_each_worker_of_a_hybrid_bucket_shares_its_name_with_a_replica() -> None:
    hybrid = BucketConfig(name="long", workers=2, hybrid=True)
    specs = processes(config(BucketConfig(name="short"), hybrid))
    replicas = [spec for spec in specs if spec.role == "replica"]
    assert [spec.name for spec in replicas] == ["long-0", "long-1"]
    assert {spec.module for spec in replicas} == {"services.trainer.replica_main"}
    assert len({spec.label for spec in specs}) == len(specs)
    assert {spec.role for spec in specs} == set(STOP_ORDER) == set(GRACE_S)


def test_workers_get_cores_of_their_own_as_long_as_there_are_any() -> None:
    spread = spread_cores(config(), [0, 1])
    assert [bucket.cpus for bucket in spread.buckets] == [[[0]], [[1]]]


def test_cores_that_the_configuration_names_are_kept() -> None:
    spread = spread_cores(config(BucketConfig(name="short", cpus=[[5]])), [0, 1])
    assert spread.buckets[0].cpus == [[5]]


def test_cores_that_the_configuration_names_are_left_to_those_workers() -> None:
    buckets = BucketConfig(name="short", cpus=[[2]]), BucketConfig(name="long", workers=2)
    spread = spread_cores(config(*buckets), [2, 3, 7])
    assert spread.buckets[1].cpus == [[3], [7]]


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([0, 1], [[[0]], [[1, 0]], [[1]]]),
        ([4, 5, 6], [[[4]], [[5, 6]], [[4]]]),
        ([3], [[[3]], [[3, 3]], [[3]]]),
    ],
)
def test_the_ranks_of_a_worker_share_cores_with_other_workers_first(
    cores: list[int], expected: list[list[list[int]]]
) -> None:
    split = BucketConfig(name="split", tensor_parallel=2)
    spread = spread_cores(config(BucketConfig(name="a"), split, BucketConfig(name="b")), cores)
    assert [bucket.cpus for bucket in spread.buckets] == expected


def test_a_trainer_that_ends_well_has_finished_the_job() -> None:
    assert after_exit("trainer", 0, 0) is AfterExit.FINISHED


@pytest.mark.parametrize(
    "role", ["coordinator", "scheduler", "rollout", "replica", "tools", "trainer"]
)
def test_a_killed_process_is_started_again_but_not_for_ever(role: str) -> None:
    assert after_exit(role, -9, 0) is AfterExit.RESTART
    assert after_exit(role, -9, KILLED_MAX) is AfterExit.GIVE_UP


def test_of_a_process_that_is_killed_over_and_over_it_is_said_how_often_and_what_to_do() -> None:
    said = describe_end(-9, KILLED_MAX, 11.7, "")
    assert said.startswith("was ended by signal 9, 5 restarts within 12 s did not help; ")
    assert "more memory" in said
    assert said.endswith("then go on with --resume")
    other = describe_end(-11, 1, 3.0, "loading weights")
    assert "signal 11, 1 restart within 3 s did not help; mend what its log shows" in other
    assert other.endswith("(it last said: loading weights)")


def test_of_a_process_that_fails_its_own_words_come_first() -> None:
    assert describe_end(1, 0, 3.0, "no port") == "no port"
    assert describe_end(1, 2, 3.0, "no port") == "no port, 2 restarts within 3 s did not help"
    assert describe_end(3, 0, 3.0, "") == "ended with exit code 3"


@pytest.mark.parametrize("role", ["coordinator", "scheduler", "rollout", "tools", "trainer"])
def test_a_configuration_error_is_never_tried_again(role: str) -> None:
    assert after_exit(role, 2, 0) is AfterExit.GIVE_UP


def test_a_failing_tool_server_is_tried_again_a_few_times() -> None:
    assert after_exit("tools", 1, 0) is AfterExit.RESTART
    assert after_exit("tools", 1, FAILED_MAX) is AfterExit.GIVE_UP


def test_the_reason_of_an_end_is_what_the_process_said_last() -> None:
    lines = [
        json.dumps({"event": "service.failed", "detail": "the disk is full"}),
        json.dumps({"event": "worker.lost"}),
    ]
    assert failure_detail(lines) == "the disk is full"
    assert failure_detail(["Traceback", "ValueError: x", ""]) == "ValueError: x"
    assert failure_detail([]) == ""
