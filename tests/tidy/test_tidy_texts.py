"""Generated files are up to date, everything is documented, and no text names one machine."""

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from common.config import Config, Section

ROOT = Path(__file__).parent.parent.parent
MACHINE_PATH = re.compile(r"(?<![\w.{<])/(?:work|root|home|Users|mnt|media)/\w")
HOST = re.compile(
    r"pypi\.org|pythonhosted|pytorch\.org/whl|npmjs\.|docker\.io|ghcr\.io|quay\.io|hf\.co/|"
    r"https?://(?:www\.)?(?:github|huggingface)\."
)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
"""The target of a Markdown link that is no URL."""
DESCRIBES_THEM = "tests/tidy/test_tidy_texts.py"
HOME_OF_THE_CONTAINER = "/home/libra"


def load_script(name: str) -> ModuleType:
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tracked_texts() -> list[tuple[str, str]]:
    """Every tracked text file that is still there, with its content."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    found: list[tuple[str, str]] = []
    for name in listing.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file() and not path.is_symlink():
            try:
                found.append((name, path.read_text()))
            except UnicodeDecodeError:
                continue  # Weights and pictures.
    return found


@pytest.mark.parametrize("pattern", [MACHINE_PATH, HOST], ids=["path", "host"])
def test_no_text_names_a_path_of_one_machine_or_a_registry(pattern: re.Pattern[str]) -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in tracked_texts()
        if name != DESCRIBES_THEM and not name.endswith(".jsonl")
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line.replace(HOME_OF_THE_CONTAINER, ""))
    ]
    assert not found, "\n".join(found)


def test_every_relative_link_leads_somewhere() -> None:
    broken = [
        f"{name}: {link}"
        for name, text in tracked_texts()
        if name.endswith(".md")
        for link in LINK.findall(text)
        if not (ROOT / name).parent.joinpath(link).exists()
    ]
    assert not broken, "\n".join(broken)


def test_the_configuration_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "CONFIG.md").read_text()
    assert written == load_script("make_config_doc").document(), "run scripts/fix"


def test_every_key_of_the_configuration_is_documented() -> None:
    missing = [
        f"{model.__name__}.{name}"
        for model in (Config, *Section.__subclasses__())
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert not missing


def test_every_message_is_documented() -> None:
    types = load_script("make_wire_schema").message_types()
    assert types
    assert not [cls.__name__ for cls in types if "__doc__" not in vars(cls) or not cls.__doc__]


def test_the_wire_schema_is_the_one_that_the_protocol_version_names() -> None:
    written = (ROOT / "tests" / "tidy" / "wire_schema.json").read_text()
    assert written == load_script("make_wire_schema").schema(), (
        "a message changed its shape: run scripts/update_schema, and raise PROTOCOL_VERSION "
        "once a release has spoken the old one"
    )
