"""House rules that no linter knows, read from the syntax trees of the product code."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SERVICES = ("coordinator", "rollout", "scheduler", "tools", "trainer")
BROAD = ("Exception", "BaseException")
BOUNDARIES = {
    "services/rollout/loop.py": {"boundary"},
    "services/rollout/torch_engine.py": {"command", "_run"},
    "services/rollout/vllm_engine.py": {"_run"},
    "services/tools/host.py": {"open_session", "_reset", "_call", "_grade", "_close"},
    "services/tools/outcomes.py": {"words_of"},
    "services/tools/threads.py": {"_work"},
    "common/clock.py": {"run_in_executor"},
    "common/service.py": {"main"},
}
"""Functions that run code which is not ours, or carry its error to whoever waits for it, and the
root of a process, which ends it with the error's name. Elsewhere
a broad except must raise again."""
LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "exception")
PARTICIPLE = re.compile(
    r"[a-z]+ed|(un)?known|(un)?told|begun|built|chosen|drawn|found|given|gone|held|kept|left|lost|made|met|read|run|seen|"
    r"sent|set|shut|spent|split|stuck|taken|torn|written|draining|stale"
)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def product_files() -> list[Path]:
    return sorted(p for package in ("common", "services") for p in (ROOT / package).rglob("*.py"))


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def at(path: Path, node: ast.stmt | ast.expr | ast.ExceptHandler) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def pure_files() -> list[Path]:
    """The modules that the layer contract calls pure."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (pure,) = [c for c in contracts["contracts"] if c["name"] == "policies are pure"]
    found: list[Path] = []
    for name in pure["source_modules"]:
        place = ROOT / name.replace(".", "/")
        found += sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return found


def test_a_pure_module_never_iterates_over_a_set() -> None:
    """The order would depend on PYTHONHASHSEED; sort it first."""
    found = [line for path in pure_files() for line in set_iterations(path)]
    assert not found, "\n".join(found)


def set_iterations(path: Path) -> Iterator[str]:
    names = set(set_names(tree(path)))
    for node in ast.walk(tree(path)):
        for iterated in iterated_by(node):
            if is_set(iterated, names):
                yield f"{at(path, iterated)}: iterates over a set; use sorted(…)"


def set_names(module: ast.Module) -> Iterator[str]:
    """Names and attributes that are annotated as sets, or given one, anywhere in the module."""
    for node in ast.walk(module):
        match node:
            case (
                ast.AnnAssign(target=ast.Name(id=name), annotation=annotation)
                | ast.arg(arg=name, annotation=ast.expr() as annotation)
            ):
                if re.match(r"(set|frozenset|Set|AbstractSet)\b", ast.unparse(annotation)):
                    yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_set(value, set()):
                yield name
            case _:
                pass


def iterated_by(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.For(iter=iterated) | ast.comprehension(iter=iterated):
            return [iterated]
        case ast.Call(func=ast.Name(id="list" | "tuple" | "iter" | "enumerate"), args=[first, *_]):
            return [first]
        case ast.Call(func=ast.Attribute(value=value, attr="pop"), args=[]):
            return [value]
        case _:
            return []


def is_set(node: ast.expr, names: set[str]) -> bool:
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in names
        case ast.BinOp(left=left, op=ast.BitOr() | ast.BitAnd() | ast.Sub(), right=right):
            return is_set(left, names) or is_set(right, names)
        case _:
            return False


def test_only_boundaries_swallow_errors_that_they_do_not_name() -> None:
    found = [line for path in product_files() for line in broad_excepts(path)]
    assert not found, "\n".join(found)


def broad_excepts(path: Path) -> Iterator[str]:
    allowed_in = BOUNDARIES.get(str(path.relative_to(ROOT)), set())
    for function, handler in handlers(tree(path), ""):
        caught = ast.unparse(handler.type) if handler.type else "Exception"
        is_broad = bool(set(re.findall(r"\w+", caught)) & set(BROAD))
        if is_broad and function not in allowed_in and not isinstance(handler.body[-1], ast.Raise):
            yield f"{at(path, handler)}: except {caught} in {function}; name the error"


def handlers(node: ast.AST, function: str | None) -> Iterator[tuple[str | None, ast.ExceptHandler]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler):
            yield function, child
        inner = (
            child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        )
        yield from handlers(child, inner)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_can_be_run_as_a_module(service: str) -> None:
    directory = ROOT / "services" / service
    assert (directory / "service.py").is_file()
    main = directory / "__main__.py"
    assert main.is_file()
    assert len(main.read_text().splitlines()) <= 15


def log_calls() -> Iterator[tuple[str, ast.expr | None]]:
    """Where something is logged, and the expression that names the event."""
    for path in product_files():
        aliases = set(log_aliases(tree(path)))
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and (
                is_log_method(node.func)
                or (isinstance(node.func, ast.Name) and node.func.id in aliases)
            ):
                yield at(path, node), next(iter(node.args), None)


def log_aliases(module: ast.Module) -> Iterator[str]:
    """Names given a choice of levels: `report = log.warning if failed else log.info`."""
    for node in ast.walk(module):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.IfExp(body=body)):
                if is_log_method(body):
                    yield name
            case _:
                pass


def is_log_method(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="log"), attr=level):
            return level in LOG_LEVELS
        case ast.Attribute(value=ast.Name(id="outcome"), attr="warn" | "tell"):
            return True  # A pure module hands the event to its shell.
        case _:
            return False


def event_names(expression: ast.expr | None) -> list[str]:
    """The literal names that an expression can have; none when it is computed."""
    match expression:
        case ast.Constant(value=str(name)):
            return [name]
        case ast.IfExp(body=body, orelse=orelse):
            return event_names(body) + event_names(orelse)
        case _:
            return []


def is_handed_on(expression: ast.expr | None) -> bool:
    """Whether the name was given elsewhere: `log.info(notice.event)`."""
    return isinstance(expression, ast.Attribute) and expression.attr == "event"


def listed_events() -> set[str]:
    page = (ROOT / "docs" / "EVENTS.md").read_text()
    return set(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE))


def test_log_events_are_a_noun_and_a_participle() -> None:
    found = [
        f"{where}: {ast.unparse(event) if event else 'nothing'} is not 'noun.past_participle'"
        for where, event in log_calls()
        if not is_handed_on(event)
        and (not event_names(event) or not all(map(is_well_named, event_names(event))))
    ]
    assert not found, "\n".join(found)


def is_well_named(event: str) -> bool:
    noun, _, verb = event.partition(".")
    named = re.fullmatch(r"[a-z_]+", noun) is not None
    return named and any(PARTICIPLE.fullmatch(word) for word in verb.split("_"))


def test_log_events_are_those_that_the_page_lists() -> None:
    logged = {name for _, event in log_calls() for name in event_names(event)}
    written = {
        node.value
        for path in product_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert sorted(logged - listed_events()) == [], "add it to docs/EVENTS.md"
    assert sorted(listed_events() - written) == [], (
        "no longer logged; remove it from docs/EVENTS.md"
    )


def test_every_refusal_is_raised_and_tested() -> None:
    text = "\n".join(p.read_text() for p in product_files() if p.name != "errors.py")
    tests = "\n".join(path.read_text() for path in files_of_tests())
    module = tree(ROOT / "common" / "errors.py")
    (enum,) = [n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "Refusal"]
    names = [ast.unparse(node.targets[0]) for node in enum.body if isinstance(node, ast.Assign)]
    unused = [name for name in names if f"Refusal.{name}" not in text]
    untested = [name for name in names if f"Refusal.{name}" not in tests]
    assert (unused, untested) == ([], [])


def test_every_test_claims_something() -> None:
    found = [line for path in files_of_tests() for line in empty_tests(path)]
    assert not found, "\n".join(found)


def empty_tests(path: Path) -> Iterator[str]:
    functions = {
        node.name: node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and node.test.value:
            yield f"{at(path, node)}: asserts a constant"
    for name, test in functions.items():
        helpers = [functions[called] for called in calls(test) if called in functions]
        if name.startswith("test_") and not any(map(claims, [test, *helpers])):
            yield f"{at(path, test)}: {name} asserts nothing"


def calls(test: ast.AST) -> set[str]:
    """Names of the functions that are called directly."""
    called = (node.func for node in ast.walk(test) if isinstance(node, ast.Call))
    return {function.id for function in called if isinstance(function, ast.Name)}


def claims(test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a test asserts, expects an error, or calls a helper that checks or waits for it."""
    if any(isinstance(node, ast.Assert) for node in ast.walk(test)) or test.name.endswith("_fine"):
        return True  # What is fine raises nothing.
    pattern = r"(raises|suppress)\(|\b\w*(check|expect|verify|assert|until|refused|wait)\w*\("
    return bool(re.search(pattern, ast.unparse(test)))


def test_assertions_are_on() -> None:
    assert __debug__, "never run with -O: assertions are part of the code"
