"""Apache Kafka's Java client, Kafka Connect and Kafka Streams, fetched by Maven. The program is conformance/java."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.client import BUILT, HERE, Program, Unavailable, run_builder

_JAVA_MIN = 17
_SHARED = ("Producing", "Consuming", "Grouping", "Administration")
_CURRENT = tuple(
    f"current.{suite}"
    for suite in ("CurrentProducing", "CurrentGroups", "CurrentAdministration", "Transactions", "Sharing", "Protocol")
)
_OLD = ("old.OldAdministration",)
_FRAMEWORKS = ("frameworks.Connecting", "frameworks.Streaming")
_MODEST = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# How Maven and the network below it speak of a registry that cannot be reached.
OFFLINE = ("Could not transfer", "Unknown host", "UnknownHost", "Connection refused", "in offline mode", "timed out")


@dataclass(frozen=True, slots=True)
class JavaClient:
    """One version of `kafka-clients`; an old one lacks some calls and has others that were dropped since."""

    version: str
    old: bool = False

    @property
    def name(self) -> str:
        """The name of the client in the report."""
        return f"java kafka-clients {self.version}"

    def build(self) -> Program:
        """Fetch the client and compile the program against it with Maven."""
        return _build(f"java-{self.version}", self.version, f"-Dleft.out={'current' if self.old else 'old'}")

    def arguments(self, address: str, served: str, only: str, registry: str) -> Sequence[str]:
        """The broker, what it serves, and the suites that this version has the calls for."""
        return [address, served, only, *_SHARED, *(_OLD if self.old else _CURRENT)]


@dataclass(frozen=True, slots=True)
class JavaFrameworks:
    """Kafka Connect and Kafka Streams of one version, which bring the client of that version along."""

    version: str

    @property
    def name(self) -> str:
        """The name of the client in the report."""
        return f"java connect and streams {self.version}"

    def build(self) -> Program:
        """Fetch both and compile their suites with Maven, without those of the client itself."""
        left_out = ("-Dleft.out=old", "-Dleft.out.too=current")
        return _build(f"frameworks-{self.version}", self.version, "-Pframeworks", *left_out)

    def arguments(self, address: str, served: str, only: str, registry: str) -> Sequence[str]:
        """The broker, what it serves, and the suites."""
        return [address, served, only, *_FRAMEWORKS]


def transaction_program(version: str) -> Sequence[str]:
    """The command of the program that the trial of transactions kills; its arguments follow."""
    output = _compile(f"java-{version}", version, "-Dleft.out=old")
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    return ["java", *_MODEST, quiet, "-cp", class_path(output), "millstream.conformance.current.TransactionProgram"]


def _build(folder: str, version: str, *settings: str) -> Program:
    output = _compile(folder, version, *settings)
    log = output / "client.log"
    log.unlink(missing_ok=True)
    logging = ["-Dorg.slf4j.simpleLogger.defaultLogLevel=info", f"-Dorg.slf4j.simpleLogger.logFile={log}"]
    return Program(["java", *_MODEST, *logging, "-cp", class_path(output), "millstream.conformance.Trial"], log)


def _compile(folder: str, version: str, *settings: str) -> Path:
    check_java()
    if shutil.which("mvn") is None:
        raise Unavailable("Maven (mvn) is not on the PATH")
    output = BUILT / folder
    command = ["mvn", "-q", "-B", f"-Dkafka.version={version}", f"-Doutput={output}", *settings, "compile"]
    run_builder(command, folder=HERE / "java", offline_marks=OFFLINE)
    return output


def class_path(output: Path) -> str:
    return f"{output / 'classes'}:{output / 'lib' / '*'}"


def check_java() -> None:
    if shutil.which("java") is None or shutil.which("javac") is None:
        raise Unavailable("a Java development kit (java, javac) is not on the PATH")
    output = subprocess.run(["javac", "-version"], capture_output=True, text=True, timeout=60)
    match = re.search(r"javac (\d+)", output.stdout + output.stderr)
    if match is None or int(match[1]) < _JAVA_MIN:
        raise Unavailable(f"Java {_JAVA_MIN} or newer is needed, found {match[0] if match else 'an unknown one'}")
