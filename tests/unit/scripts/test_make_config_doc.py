"""What docs/CONFIG.md calls the types of keys."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_config_doc.py"


def words(annotation: object) -> str:
    spec = importlib.util.spec_from_file_location("make_config_doc", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.annotation_words(annotation)


def test_lists_are_named_in_the_plural_at_every_depth() -> None:
    assert words(list[float]) == "list of numbers"
    assert words(list[list[int]]) == "list of lists of integers"
