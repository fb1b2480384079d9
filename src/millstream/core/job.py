"""Runs of jobs: users' own Spark programs, whose code and history are in the catalog."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final
from uuid import UUID

from millstream.core.errors import InvalidSetting

ENTRY: Final = "run"
"""The function that a job's code defines."""
CODE_LENGTH_MAX: Final = 512 * 1024
RUNS_KEPT: Final = 100
"""How many runs of a job are remembered."""
ERROR_LENGTH_MAX: Final = 8192
FUNCTIONS_MAX: Final = 100
_MEMORY: Final = re.compile(r"(\d{1,6})([kmg])\Z", re.IGNORECASE)
_UNIT: Final = {"k": 2**10, "m": 2**20, "g": 2**30}


class RunState(StrEnum):
    """How far a run is."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """One run of a job, with all attempts at it."""

    pipeline_id: UUID
    number: int
    """Counted from 1."""
    state: RunState
    scheduled_ms: int
    """The time for which it was due."""
    started_ms: int
    ended_ms: int = 0
    attempt: int = 1
    node: int = -1
    code_hash: str = ""
    """That of the code and the packages it runs with."""
    version: int = 0
    """That of the pipeline's declaration."""
    request: int = 0
    """How many runs had been asked for when it began."""
    error: str = ""
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.state is not RunState.RUNNING


def code_hash(code: str, lock: str) -> str:
    """Return a short name for code together with the packages it runs with."""
    return sha256(f"{sha256(code.encode()).hexdigest()}\n{lock}".encode()).hexdigest()[:16]


def check_code(code: str, *, entry: str = ENTRY, file_name: str = "job.py") -> None:
    """Raise `InvalidSetting` unless this is Python that defines the function to call."""
    try:
        tree = ast.parse(code, filename=file_name)
    except (SyntaxError, ValueError) as error:
        raise InvalidSetting(f"the code is not Python: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry:
            given = node.args
            positional = len(given.posonlyargs) + len(given.args)
            if given.vararg is None and not positional - len(given.defaults) <= 2 <= positional:
                raise InvalidSetting(
                    f"line {node.lineno}: {entry} has to take two arguments: {entry}(spark, millstream)"
                )
            return
        if isinstance(node, ast.AsyncFunctionDef) and node.name == entry:
            raise InvalidSetting(f"line {node.lineno}: {entry} must not be async")
    raise InvalidSetting(f"the code defines no function {entry}: begin with `def {entry}(spark, millstream):`")


def parse_functions(text: str, code: Mapping[str, str]) -> dict[str, str]:
    """Parse `prices:vat, prices:net` into the module of each function; raise `InvalidSetting` for what cannot be.

    `code` has the source of modules by name; the others are in packages.
    """
    found: dict[str, str] = {}
    for given in filter(None, map(str.strip, text.split(","))):
        module, colon, name = given.partition(":")
        if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise InvalidSetting(f"a function is named as module:function, not {given!r}")
        if name in found:
            raise InvalidSetting(f"two functions are called {name!r}; the statement could not distinguish them")
        found[name] = module
        if module in code:
            _check_function(code[module], module, name)
    if len(found) > FUNCTIONS_MAX:
        raise InvalidSetting(f"a statement has at most {FUNCTIONS_MAX} functions, not {len(found)}")
    unused = sorted(set(code) - set(found.values()))
    if unused:
        raise InvalidSetting(
            f"module {unused[0]!r} has code, but none of its functions is listed; remove the code or list a function"
        )
    return found


def _check_function(code: str, module: str, name: str) -> None:
    try:
        tree = ast.parse(code, filename=f"{module}.py")
    except (SyntaxError, ValueError) as error:
        raise InvalidSetting(f"{module}.py is not Python: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name == name:
            raise InvalidSetting(f"{module}.py, line {node.lineno}: {name} must not be async")
        if isinstance(node, ast.FunctionDef) and node.name == name:
            if node.returns is None and not node.decorator_list:
                raise InvalidSetting(
                    f"{module}.py, line {node.lineno}: say what {name} returns, such as `def {name}(…) -> float`, or "
                    'decorate it with @udf("double") of pyspark.sql.functions'
                )
            return
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == name for target in node.targets):
            return
    raise InvalidSetting(f"{module}.py defines no function {name!r}")


def parse_memory(text: str, *, name: str) -> int:
    """Parse an amount of memory as Spark writes it, such as 512m or 2g, into bytes."""
    found = _MEMORY.match(text.strip())
    if found is None or not int(found[1]):
        raise InvalidSetting(f"{name} is an amount of memory such as 512m or 2g, not {text!r}")
    return int(found[1]) * _UNIT[found[2].lower()]
