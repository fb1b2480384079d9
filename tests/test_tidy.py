"""Style checks: the promises of `docs/` and CONTRIBUTING.md about the code."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import millstream
from millstream.cli.app import ORDER
from millstream.core import errors
from millstream_testing.config_reference import reference
from millstream_testing.protocol_reference import protocol_page

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "millstream"

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 1_000
PARAMETERS_MAX = 11
NESTING_MAX = 6
PUBLIC_ATTRIBUTES_MAX = 26
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
# Assembled here, so that this file does not match itself.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
MACHINE_PATHS = re.compile(
    r"(?<![\w.$}])/(" + "|".join(("wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers")) + r")/\w"
)
REGISTRY_HOSTS = re.compile(
    "|".join(("py" + r"pi\.(org|python)", "python" + r"hosted\.org", "crates" + r"\.io", "npm" + r"js\.(org|com)"))
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
DEFINITION = re.compile(r"( *)(async def|def|class|@)\b")


@cache
def tracked() -> tuple[Path, ...]:
    """Every file of the repository, untracked ones included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(path for path in (ROOT / name for name in sorted(set(listed))) if path.is_file())


def python_files(folder: Path = ROOT) -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py" and path.is_relative_to(folder)]


def texts() -> Iterator[tuple[Path, str]]:
    for path in tracked():
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


@cache
def parsed(path: Path) -> ast.Module:
    # The trees hold no garbage, and collecting while they are built takes longer than parsing.
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def forget_trees() -> Iterator[None]:
    """Drop the trees before other tests run in this process."""
    yield
    parsed.cache_clear()


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements directly within a node, and nodes that contain statements; most of a tree is expressions."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(node, name, ())
        # The body of a conditional expression is no list.
        yield from inner if isinstance(inner, list) else ()


def definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The functions and classes within a node, however deep."""
    for child in statements(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        yield from definitions(child)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in definitions(parsed(path)) if not isinstance(node, ast.ClassDef))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def may_have_long_functions(path: Path) -> bool:
    """Whether more lines than allowed lie between a function and what follows it at its depth or above.

    This quick check avoids parsing most files.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [
        (number, len(found[1]), found[2]) for number, line in enumerate(lines) if (found := DEFINITION.match(line))
    ]
    return any(
        next((other for other, above, _ in starts[index + 1 :] if above <= depth), len(lines)) - number
        > FUNCTION_LINES_MAX
        for index, (number, depth, kind) in enumerate(starts)
        if kind.endswith("def")
    )


def test_functions_are_short() -> None:
    long = [
        f"{short(path)}:{function.lineno} {function.name} has {length(function)} lines"
        for path in python_files()
        if may_have_long_functions(path)
        for function in functions(path)
        if length(function) > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_files_are_short() -> None:
    long = [
        f"{short(path)} has {count} lines"
        for path in python_files()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > FILE_LINES_MAX
    ]
    assert long == []


def test_functions_take_few_parameters() -> None:
    """A command's parameters are its flags, so commands are exempt."""
    many = [
        f"{short(path)}:{function.lineno} {function.name} takes {count} parameters"
        for path in python_files(SOURCE)
        if not path.is_relative_to(SOURCE / "cli")
        for function in functions(path)
        if (count := len([*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]))
        > PARAMETERS_MAX + 1
    ]
    assert many == []


BLOCKS = ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.Match


def nesting(node: ast.AST, depth: int = 0) -> int:
    """The depth of nested blocks in a function, not counting functions defined within it."""
    deepest = depth
    for child in statements(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def test_blocks_are_not_nested_deep() -> None:
    deep = [
        f"{short(path)}:{function.lineno} {function.name} nests {depth} blocks"
        for path in python_files(SOURCE)
        for function in functions(path)
        if (depth := nesting(function)) > NESTING_MAX
    ]
    assert deep == []


def public_attributes(class_: ast.ClassDef) -> set[str]:
    """The attributes without an underscore that `__init__` sets."""
    return {
        node.attr
        for function in class_.body
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not node.attr.startswith("_")
    }


def test_classes_have_few_public_attributes() -> None:
    many = [
        f"{short(path)}:{node.lineno} {node.name} has {count} public attributes"
        for path in python_files(SOURCE)
        for node in definitions(parsed(path))
        if isinstance(node, ast.ClassDef) and (count := len(public_attributes(node))) > PUBLIC_ATTRIBUTES_MAX
    ]
    assert many == []


def test_only_a_log_writes_its_attributes() -> None:
    """The modules beside it read them, and change them through methods of `Log` and its parts."""
    owned = {"log", "_log", "health", "segments"}
    written = [
        f"{short(path)}:{node.lineno} writes {node.attr}"
        for path in python_files(SOURCE / "broker")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if (isinstance(node.value, ast.Name) and node.value.id in owned)
        or (isinstance(node.value, ast.Attribute) and node.value.attr in owned)
    ]
    assert written == []


def test_nothing_is_left_unfinished() -> None:
    found = [
        f"{short(path)}:{number}"
        for path, text in texts()
        if path.suffix in {".py", ".md", ".toml", ""}
        for number, line in enumerate(text.splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert found == []


def test_modules_are_named_after_nouns() -> None:
    bad = [
        short(path)
        for path in python_files()
        if FORBIDDEN_NAMES & {*path.relative_to(ROOT).with_suffix("").parts, *path.stem.split("_")}
    ]
    assert bad == []


def test_packages_hold_no_code() -> None:
    # Public names, and what must run before any broker module imports kio.
    allowed = (SOURCE, SOURCE / "broker")
    full = [
        short(path)
        for path in python_files(SOURCE)
        if path.name == "__init__.py"
        and path.parent not in allowed
        and not all(isinstance(node, ast.Expr) for node in parsed(path).body)
    ]
    assert full == []


def test_the_package_has_its_version() -> None:
    assert f'version = "{millstream.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_public_names_are_pinned_and_imported_when_used() -> None:
    names = (
        "Connection IdempotentHandler Message MessageStream MillstreamError NewMessage PublishFailed Receipt "
        "Reject RetryLater Sandbox Subscriber SyncConnection SyncMessage SyncMessageStream SyncSubscriber "
        "TransactionalHandler check_receipts connect connect_sync correlated correlation_id open open_sync"
    )
    assert " ".join(millstream._PLACES) == names
    checked = [
        alias.asname
        for node in parsed(SOURCE / "__init__.py").body
        if isinstance(node, ast.If)
        for imported in node.body
        if isinstance(imported, ast.ImportFrom)
        for alias in imported.names
    ]
    assert sorted(name or "" for name in checked) == sorted(names.split())
    for name in names.split():
        assert getattr(millstream, name).__name__ == name
    script = "import sys, millstream; sys.exit(any(name.startswith('millstream.') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_commands_are_pinned() -> None:
    commands = (
        "serve topic publish tail message group subscription dlq audit schema pipeline replay mirror transaction user "
        "token acl secrets quota certs profile client cluster doctor demo"
    )
    assert " ".join(ORDER) == commands


def is_api(node: ast.ClassDef) -> bool:
    assigned = [target for item in node.body if isinstance(item, ast.Assign) for target in item.targets]
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    return "changes" in methods or any(
        isinstance(target, ast.Name) and target.id in ("changes", "key") for target in assigned
    )


@pytest.mark.parametrize(
    "path", sorted((SOURCE / "broker" / "kafka" / "apis").glob("[!_]*.py")), ids=lambda path: path.stem
)
def test_every_api_opens_with_its_versions(path: Path) -> None:
    docstring = ast.get_docstring(parsed(path)) or ""
    apis = [node for node in parsed(path).body if isinstance(node, ast.ClassDef) and is_api(node)]
    described = [ast.get_docstring(api) or "" for api in apis] if len(apis) > 1 else [docstring]
    if docstring.startswith("Private requests "):
        assert all(described)
        return
    for description in described:
        assert re.match(r"\w+ \(key \d+\), version", description), (
            "the docstring of the API, or of its module, starts like: Fetch (key 1), versions 4 to 17"
        )


def test_the_configuration_page_is_the_generated_one() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "run `make docs`"


def test_the_protocol_page_is_the_generated_one() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert page == protocol_page(), "run `make docs`"


def test_the_diagram_of_the_error_tree_is_current() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([│├└─ ]*)([A-Z]\w+)(?:  |$)", line)
        if match and (match[1] or match[2] == "MillstreamError"):
            drawn.append((len(match[1]) // 4, match[2]))
    parents: dict[str, str] = {}
    above: dict[int, str] = {}
    for depth, name in drawn:
        above[depth] = name
        parents[name] = above[depth - 1] if depth else "Exception"
    real = {
        name: value.__base__.__name__
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__base__ is not None
    }
    assert parents == real


def test_no_machine_is_named() -> None:
    found = [
        f"{short(path)}:{number}: {line.strip()[:80]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATHS.search(line) or REGISTRY_HOSTS.search(line)
    ]
    assert found == []


def anchors(page: Path) -> set[str]:
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_resolve() -> None:
    broken = []
    for page in (path for path in tracked() if path.suffix == ".md"):
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            name, _, anchor = target.partition("#")
            linked = (page.parent / name).resolve() if name else page
            if not linked.exists() or (anchor and anchor not in anchors(linked)):
                broken.append(f"{short(page)}: {target}")
    assert broken == []


def test_paths_named_in_the_docs_exist() -> None:
    path_name = re.compile(r"`((?:src|tests|trials|docs|benchmarks)/[\w./-]+|(?:\w+/)+\w+\.py)`")
    missing = [
        f"{short(page)}: {name}"
        for page in (path for path in tracked() if path.suffix == ".md")
        for name in path_name.findall(page.read_text(encoding="utf-8"))
        if not any((base / name).exists() for base in (ROOT, SOURCE, page.parent))
    ]
    assert missing == []


def test_test_file_names_are_unique() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
