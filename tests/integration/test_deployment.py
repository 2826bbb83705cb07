"""The compose file and the systemd units are valid and start the processes of the demo."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from common.config_load import load_config
from services.cli.main import SERVICES
from services.cli.plan import processes

ROOT = Path(__file__).parent.parent.parent
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
TIMEOUT_S = 60.0


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def demo_processes() -> set[tuple[str, str]]:
    config = load_config(ROOT / "configs" / "demo" / "demo.toml")
    return {(process.role, process.name) for process in processes(config)}


def compose_services() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with vLLM only")
    return yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


def test_docker_compose_accepts_the_file() -> None:
    if shutil.which("docker") is None or call("docker", "compose", "version").returncode:
        pytest.skip("docker compose is not installed")
    result = call("docker", "compose", "config", "-q")
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_compose_serves_every_process_of_the_demo() -> None:
    served: set[tuple[str, str]] = set()
    for service in compose_services().values():
        role, *arguments = service["command"]
        name = arguments[arguments.index("--name") + 1] if "--name" in arguments else role
        served.add((role, name))
    assert served == demo_processes()


def test_no_container_has_capabilities_or_a_writable_image() -> None:
    for service in compose_services().values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"]
        assert "no-new-privileges:true" in service["security_opt"]


def test_each_role_has_a_unit() -> None:
    roles = {re.sub(r"libra-|@|\.service", "", unit.name) for unit in UNITS}
    assert roles == set(SERVICES)
    assert roles >= {role for role, _ in demo_processes()}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    # The command must exist for the check; on this machine it lies elsewhere.
    text = unit.read_text().replace("/opt/libra/.venv/bin/libra", "/bin/true")
    assert text != unit.read_text()
    copy = tmp_path / unit.name.replace("@.", "@one.")
    copy.write_text(text)
    result = call("systemd-analyze", "verify", "--recursive-errors=no", str(copy))
    # An unknown key is only a warning, so any output counts.
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_no_unit_is_more_exposed_than_it_must_be(unit: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    limit = "60" if "tools" in unit.name else "45"
    result = call(
        "systemd-analyze", "security", "--offline=true", f"--threshold={limit}", str(unit)
    )
    assert result.returncode == 0, result.stdout[-400:]
