"""Real clients on a locked broker: each mechanism over TLS, mutual TLS, and Kafka's tools for users and rules.

Part of `make conformance`. The clients get files of settings as Kafka's tools take them, one for each way to sign in.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.peers.kafka import fetch
from benchmarks.subject import PeerUnavailable
from confluent_kafka import KafkaException, Producer
from conformance.client import Unavailable
from conformance.go_client import GoClient
from conformance.served import API_VERSIONS_KEY

from millstream_testing.security import ADMIN, ALICE, Locked, locked_server

HERE: Final = Path(__file__).parent
NAME: Final = "secured"
RUN_S_MAX: Final = 600.0
_CAROL: Final = "carol"
_CAROLS_PASSWORD: Final = "carol-password"
_QUIET: Final = "-Dorg.slf4j.simpleLogger.defaultLogLevel=off"
_LOGINS: Final = "org.apache.kafka.common.security"

Say = Callable[[str], str]
Report = Callable[[str, str], None]
"""Takes a verdict and its subject."""


def ways(locked: Locked, folder: Path) -> Sequence[Path]:
    """Write the settings of every way in which alice signs in."""
    shared = {
        "bootstrap.servers": locked.server.kafka,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(locked.certificates.ca),
    }
    clients = {
        "PLAIN": _with_password("PLAIN", *ALICE),
        "SCRAM-SHA-256": _with_password("SCRAM-SHA-256", *ALICE),
        "SCRAM-SHA-512": _with_password("SCRAM-SHA-512", *ALICE),
        "OAUTHBEARER": _with_token(locked.issuer.token("alice", lifetime_s=3600), folder / "token"),
        "certificate": _with_certificate(locked, folder / "alice.both.pem"),
    }
    return [_write(folder / f"{name}.properties", shared | settings) for name, settings in clients.items()]


def _with_password(mechanism: str, user: str, password: str) -> dict[str, str]:
    login = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f'{_LOGINS}.{login} required username="{user}" password="{password}";',
        "trial.user": user,
        "trial.password": password,
    }


def _with_token(token: str, file: Path) -> dict[str, str]:
    file.write_text(token, encoding="utf-8")
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.jaas.config": f"{_LOGINS}.oauthbearer.OAuthBearerLoginModule required;",
        "sasl.login.callback.handler.class": f"{_LOGINS}.oauthbearer.OAuthBearerLoginCallbackHandler",
        "sasl.oauthbearer.token.endpoint.url": file.as_uri(),
        "trial.token": token,
    }


def _with_certificate(locked: Locked, both: Path) -> dict[str, str]:
    certificate, key = locked.certificates.client("alice")
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return {"security.protocol": "SSL", "ssl.keystore.type": "PEM", "ssl.keystore.location": str(both)}


def _write(file: Path, settings: Mapping[str, str]) -> Path:
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="utf-8")
    return file


def try_secured(report: Report, say: Say) -> None:
    """Run every client and tool on a separate locked broker; skip those that cannot be fetched."""
    say("a locked broker")
    with tempfile.TemporaryDirectory(prefix="millstream-conformance-") as name:
        folder = Path(name)
        with locked_server(folder) as locked:
            files = [str(file) for file in ways(locked, folder)]
            try:
                jars = fetch(HERE / "tools.pom.xml")
            except PeerUnavailable as reason:
                report("skipped", str(reason))
            else:
                allowed = (folder / "token").as_uri()
                urls = [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={allowed}"]
                urls += [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.files={folder / 'token'}"]
                java = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", _QUIET, *urls, "-cp", f"{jars}/*"]
                _pass_on([*java, str(HERE / "Secured.java"), *files], report, say)
                _try_tools(java, locked, folder, report)
            try:
                program = GoClient().build()
            except Unavailable as reason:
                report("skipped", str(reason))
            else:
                served = f"{API_VERSIONS_KEY}:0-4"
                _pass_on([*program.command, locked.server.kafka, served, "", "", *files], report, say)


def _pass_on(command: Sequence[str], report: Report, say: Say) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S_MAX, stdin=subprocess.DEVNULL)
    for line in done.stdout.splitlines():
        say(line)
    if done.returncode not in (0, 1) or (done.returncode and "FAILED" not in done.stdout):
        report("FAILED", f"{command[0]} exited with code {done.returncode}: {done.stderr[-2000:]}")


# -- Kafka's own tools --------------------------------------------------------------------------------------------


def _try_tools(java: Sequence[str], locked: Locked, folder: Path, report: Report) -> None:
    admin = folder / "admin.properties"
    _write(
        admin,
        {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(locked.certificates.ca),
            **_with_password("SCRAM-SHA-512", *ADMIN),
        },
    )
    reached = ["--bootstrap-server", locked.server.kafka, "--command-config", str(admin)]
    configs = [*java, "kafka.admin.ConfigCommand", *reached]
    acls = [*java, "org.apache.kafka.tools.AclCommand", *reached]
    carol = ["--entity-type", "users", "--entity-name", _CAROL]
    rule = ["--allow-principal", f"User:{_CAROL}", "--operation", "All", "--topic", _CAROL]
    credential = f"SCRAM-SHA-512=[iterations=8192,password={_CAROLS_PASSWORD}]"
    node = ["--entity-type", "brokers", "--entity-name", "1"]
    steps: Sequence[tuple[str, Sequence[str], str]] = [
        ("kafka-configs adds a user", [*configs, "--alter", *carol, "--add-config", credential], "Completed"),
        ("kafka-configs describes a user", [*configs, "--describe", *carol], "SCRAM-SHA-512=iterations=8192"),
        ("kafka-acls adds a rule", [*acls, "--add", *rule], f"User:{_CAROL}"),
        ("kafka-acls lists rules", [*acls, "--list", "--topic", _CAROL], f"principal=User:{_CAROL}"),
        ("the user may do what the rule says", (), ""),
        ("kafka-acls removes a rule", [*acls, "--remove", "--force", *rule], ""),
        ("the user may do it no longer", (), "TOPIC_AUTHORIZATION_FAILED"),
        (
            "kafka-configs sets a setting of a node",
            [*configs, "--alter", *node, "--add-config", "max.connections=2000"],
            "Completed",
        ),
        ("kafka-configs describes a node", [*configs, "--describe", *node], "max.connections=2000"),
        (
            "kafka-configs deletes a user",
            [*configs, "--alter", *carol, "--delete-config", "SCRAM-SHA-512"],
            "Completed",
        ),
    ]
    for title, command, expected in steps:
        said = _run_tool(command) if command else _send_as_carol(locked)
        is_right = expected in said if expected or command else not said
        report("ok" if is_right else "FAILED", f"Tools: {title}" + ("" if is_right else f" -- {said[-500:]}"))


def _run_tool(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S_MAX, stdin=subprocess.DEVNULL)
    return done.stdout + (f"exit code {done.returncode}: {done.stderr}" if done.returncode else "")


def _send_as_carol(locked: Locked) -> str:
    """Produce one message; return the broker's error."""
    errors: list[str] = []
    producer = Producer(
        {
            "bootstrap.servers": locked.server.kafka,
            "log_level": 0,
            "message.timeout.ms": 30_000,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(locked.certificates.ca),
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": _CAROL,
            "sasl.password": _CAROLS_PASSWORD,
        }
    )
    try:
        producer.produce(_CAROL, b"x", on_delivery=lambda error, _: errors.append(error.name() if error else ""))
        producer.flush(60)
    except KafkaException as error:
        return str(error)
    return errors[0] if errors else "no response"
