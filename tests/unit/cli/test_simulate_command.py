"""`libra simulate`: what it refuses, and the shape of what it says."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from common.errors import ConfigError
from services.cli.bench import BenchReport
from services.cli.simulate import (
    EVENTS_MEASURED_MIN,
    TRACE,
    Asked,
    check_spec,
    comparison_checks,
    parse_policies,
    parse_strengths,
    policy_names,
    rate_checks,
    run_experiment,
    simulate_compare,
    simulate_dial,
    simulate_one,
)
from services.cli.simulate_commands import CLUSTERS as CLUSTER_NAMES
from services.cli.simulate_commands import EXPERIMENTS as EXPERIMENT_IDS
from services.cli.simulate_commands import POLICIES, WORKLOADS, simulate
from services.cli.simulate_plots import check_plot
from services.simulator.cluster import CLUSTERS
from services.simulator.compare import Comparison
from services.simulator.experiments import EXPERIMENTS
from services.simulator.runs import RunSpec, play_all, seeds_of
from services.simulator.workload_presets import PRESETS

SPEC = RunSpec("search-r1", "least_load", steps=1, groups_per_step=2)


def asked(spec: RunSpec = SPEC, plot: Path | None = None) -> Asked:
    return Asked(spec, seeds=2, processes=1, plot=plot)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (RunSpec("chess", "libra"), "--workload: no workload 'chess'; one of"),
        (RunSpec("search-r1", "libra", cluster="moon"), "--cluster: no cluster 'moon'; one of"),
        (RunSpec("trace", "libra"), "--workload trace: needs --trace FILE"),
        (RunSpec("trace", "libra", trace="no.jsonl"), "--trace: no.jsonl is no file"),
        (RunSpec("dapo", "libra", trace="no.jsonl"), "--trace: replays a file, and dapo does not"),
        (RunSpec("search-r1", "libra", scale=0.0), "--scale: 0 is no factor"),
        (RunSpec("search-r1", "libra", scale=math.nan), "--scale: nan is no factor"),
        (RunSpec("search-r1", "libra", scale=math.inf), "--scale: inf is no factor"),
        (RunSpec("search-r1", "libra", strength=1.5), "--strength: 1.5 is no share of variance"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_the_name_of_its_option(
    spec: RunSpec, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        check_spec(spec)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_spec(RunSpec("chess", "libra", cluster="moon", scale=-1.0))
    assert len(caught.value.problems) == 3


def test_policies_are_parsed_by_name_and_all_means_all() -> None:
    assert parse_policies("--compare", "libra, oracle") == ["libra", "oracle"]
    assert parse_policies("--compare", "all") == policy_names()
    with pytest.raises(ConfigError, match="no policy 'best'; take all, or some of libra"):
        parse_policies("--compare", "best")
    with pytest.raises(ConfigError, match=r"no policy 'oraccle' \(did you mean 'oracle'\?\); take"):
        parse_policies("--policy", "oraccle")
    with pytest.raises(ConfigError, match="named twice"):
        parse_policies("--compare", "libra,libra")


def test_strengths_are_shares() -> None:
    assert parse_strengths("0.02,0.6") == [0.02, 0.6]
    with pytest.raises(ConfigError, match="--dial: 'x' is no number"):
        parse_strengths("0.02,x")
    with pytest.raises(ConfigError, match="--dial: 2 is no share"):
        parse_strengths("2")
    with pytest.raises(ConfigError, match="--dial: a strength is named twice"):
        parse_strengths("0.2,0.6,0.20")


def test_a_picture_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        check_plot(tmp_path / "missing" / "a.png")
    with pytest.raises(ConfigError, match=r"no \.png"):
        check_plot(tmp_path / "a.doc")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.png cannot be written: Is a directory"):
        check_plot(tmp_path / "folder.png")


def test_looking_whether_a_picture_can_be_written_leaves_the_folder_as_it_was(
    tmp_path: Path,
) -> None:
    old = tmp_path / "old.png"
    old.write_bytes(b"kept")
    check_plot(old)
    check_plot(tmp_path / "new.png")
    assert [path.name for path in tmp_path.iterdir()] == ["old.png"]
    assert old.read_bytes() == b"kept"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"policy": "libra", "compare": "all"}, "--policy: runs one policy; drop it or --compare"),
        ({"policy": "libra", "dial": "0.2"}, "--policy: runs one policy; drop it or --dial"),
        ({"strength": 0.2, "dial": "0.2"}, "--strength: --dial sets it; drop one of them"),
        ({"plot": Path("a.png"), "experiment": "A0"}, "brings all that it needs; drop --plot"),
        ({"strength": 0.2, "experiment": "A0"}, "drop --strength"),
        ({"compare": "all", "experiment": "A0"}, "drop --compare"),
        ({"steps": 8, "experiment": "A0"}, "drop --steps"),
        (
            {"scale": 1.0, "cluster": "paper", "processes": 0, "experiment": "A8"},
            "drop --scale, --cluster, --processes",
        ),
        ({"strength": 0.2, "trace": "a.jsonl"}, "--strength: a recording says .* or --trace"),
        ({"dial": "0.2", "trace": "a.jsonl"}, "--dial: a recording says .* or --trace"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        simulate(**given)


def test_help_lists_all_there_is() -> None:
    def listed(names: str) -> list[str]:
        return names.replace(" or ", ", ").split(", ")

    assert listed(WORKLOADS) == [*PRESETS, TRACE]
    assert listed(POLICIES) == policy_names()
    assert listed(CLUSTER_NAMES) == list(CLUSTERS)
    assert listed(EXPERIMENT_IDS) == list(EXPERIMENTS)


def test_a_recording_alone_is_replayed_with_the_policy_libra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = {"prompt_tokens_added": 20, "output_tokens": 7}
    recording = tmp_path / "one.jsonl"
    recording.write_text(json.dumps({"trajectory_id": "t0", "turns": [turn]}))
    with pytest.raises(typer.Exit):
        simulate(trace=str(recording), steps=1, seeds=1, processes=1, cluster="node")
    told = capsys.readouterr().out
    assert "libra" in told
    assert "limit" not in told  # No check, no head of a table of checks.


def test_a_table_leaves_single_runs_to_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    report = BenchReport("x", {"libra": {"p99": 1.5, "runs": [{"seed": 0}]}}, [])
    report.print_table()
    told = capsys.readouterr().out
    assert "libra.p99" in told
    assert "runs" not in told
    assert '"seed": 0' in report.to_json()


def test_an_unknown_experiment_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no experiment 'A99'; one of A0, A1, A2, A8"):
        run_experiment("A99", seeds=1)


def test_one_policy_reports_its_figures_and_event_rates() -> None:
    done = simulate_one(asked())
    parsed = json.loads(done.report.to_json())
    assert parsed["figures"]["least_load"]["tokens/s"]["median"] > 0
    assert len(parsed["figures"]["least_load"]["runs"]) == 2
    assert parsed["figures"]["least_load"]["runs"][0]["events_per_s"] > 0


def test_the_event_rate_is_judged_only_of_runs_that_are_long_enough_to_show_one() -> None:
    short = SPEC.play()
    slow = replace(short, events=EVENTS_MEASURED_MIN, real_s=10.0)
    assert rate_checks([replace(slow, events=EVENTS_MEASURED_MIN - 1)]) == []
    (check,) = rate_checks([slow, replace(short, real_s=1e-9)])
    assert (check.name, check.value, check.ok) == ("events per second on one core", 10_000.0, False)


@pytest.mark.slow
def test_a_comparison_has_checks_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "policies.png"
    done = simulate_compare(asked(plot=picture), ["libra", "least_load", "oracle"])
    names = [check.name for check in done.report.checks]
    assert names == [
        "libra / least_load (the best other)",
        "libra / oracle",
        "tokens that libra moved",
    ]
    assert picture.stat().st_size > 0


@pytest.mark.slow
def test_the_dial_gives_a_point_for_each_strength(tmp_path: Path) -> None:
    picture = tmp_path / "dial.svg"
    done = simulate_dial(asked(plot=picture), ["libra", "least_load"], [0.02, 0.6])
    assert {"strength 0.02", "strength 0.6"} <= set(done.report.figures)
    assert [check.limit for check in done.report.checks] == [">= 0.97", ">= 1", "<= 0.15"]
    assert picture.stat().st_size > 0


def test_ratios_are_taken_seed_by_seed() -> None:
    comparison = Comparison.of(
        play_all(seeds_of(SPEC, ["least_load", "round_robin"], 2), processes=1)
    )
    assert comparison.ratio("least_load", "least_load") == (1.0, 1.0, 1.0)
    assert comparison.best_other() in {"least_load", "round_robin"}
    assert comparison_checks(comparison, SPEC) == []


def test_moved_tokens_are_limited_where_the_limit_was_stated() -> None:
    comparison = Comparison.of(
        play_all([replace(SPEC, policy=policy) for policy in ("libra", "oracle")], processes=1)
    )
    drawn = {name: replace(SPEC, workload=name) for name in ("search-r1", "dapo", "r2e")}
    named = {
        name: [check.name for check in comparison_checks(comparison, spec)]
        for name, spec in drawn.items()
    }
    assert named["search-r1"] == ["libra / oracle", "tokens that libra moved"]
    assert named["dapo"] == named["r2e"] == ["libra / oracle"]
    weak = replace(SPEC, strength=0.2)
    assert comparison_checks(comparison, weak) == []
