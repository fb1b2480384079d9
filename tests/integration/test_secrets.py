"""Secrets at rest on a real server: never in plain text, opened with the key, parked without it, resealed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]

from millstream.core.push import HEADERS, SECRET, URL
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.command import CommandLine, Outcome, call_command
from millstream_testing.server import Server
from millstream_testing.webhook import Webhook

WORD = "a-signing-secret-of-the-test"
BEARER = "a-bearer-of-the-test"
SPARK_WORD = "a-secret-of-spark"
WAIT_S = 120.0


class PushingServer:
    """A server that pushes, with keys beside its data folder."""

    def __init__(self, folder: Path, server: Server, hook: Webhook) -> None:
        self.folder = folder
        self.server = server
        self.hook = hook
        self.keys = folder / "data.state" / "millstream" / "secrets.keys"
        self._run = CommandLine(server.kafka)

    async def run(self, *arguments: object) -> Outcome:
        done = await asyncio.to_thread(self._run, *arguments)
        assert done.code == 0, done.err
        return done

    async def create(self, name: str) -> None:
        (self.folder / "word").write_text(f"{WORD}\n")
        (self.folder / "bearer").write_text(f"Bearer {BEARER}\n")
        secrets = ("--push-secret", f"@{self.folder}/word", "--push-header", f"Authorization=@{self.folder}/bearer")
        await self.run("subscription", "create", name, "--topic", name, "--push", self.hook.url, *secrets)

    async def publish(self, topic: str, value: str) -> None:
        async with Client.connect(self.server.kafka) as client:
            await client.metadata([topic], create=True)
            record = NewRecord(b"k", value.encode(), (), int(time.time() * 1000))
            await client.produce(topic, 0, encode_batch([record]))

    async def arrived(self, value: str) -> None:
        """Wait for a message at the endpoint, with its signature and header."""
        await self.hook.until(lambda: value.encode() in self.hook.bodies, wait_s=WAIT_S)
        (request,) = (request for request in self.hook.requests if request.body == value.encode())
        assert request.is_signed_by(WORD.encode())
        assert request.headers["authorization"] == f"Bearer {BEARER}"

    async def parked(self, name: str) -> str:
        """Wait until push is parked, and return the reason."""
        async with Client.connect(self.server.kafka) as client, asyncio.timeout(WAIT_S):
            while True:
                (described,) = await SubscriptionClient(client).describe([name])
                if described["push"] and described["push"][0]["state"] == "parked":
                    assert described["overrides"][SECRET] == described["overrides"][HEADERS] == "(hidden)"
                    return str(described["push"][0]["last_error"])
                await asyncio.sleep(0.1)


@asynccontextmanager
async def pushing(folder: Path, **settings: object) -> AsyncIterator[PushingServer]:
    options = {"push-private-addresses": "true", "pipelines-enabled": "false"} | settings
    async with Webhook() as hook:
        with Server(folder / "data", settings=options) as server:
            yield PushingServer(folder, server, hook)


def everything_in(*folders: Path) -> bytes:
    return b"".join(path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file())


async def test_a_secret_is_never_stored_in_plain_text(tmp_path: Path) -> None:
    settings = {"pipelines-spark": f"spark.hadoop.fs.s3a.secret.key={SPARK_WORD}", "log-level": "debug"}
    async with pushing(tmp_path, **settings) as node:
        assert not node.keys.exists()
        await node.create("sealed")
        assert node.keys.stat().st_mode & 0o777 == 0o600
        await node.publish("sealed", "one")
        await node.arrived("one")

        main = psutil.Process(node.server.pid)
        children = main.children(recursive=True)
        arguments = " ".join(part for process in children for part in process.cmdline())
        assert "push" in arguments
        shown = [
            arguments,
            str(await node.run("subscription", "describe", "sealed", "--json")),
            str(await node.run("subscription", "list", "--json")),
            str(await node.run("secrets", "list", "--json")),
        ]
        async with httpx.AsyncClient(base_url=f"http://{node.server.http}", timeout=WAIT_S) as http:
            shown += [(await http.get(path)).text for path in ("/metrics", "/v1/subscriptions/sealed")]
        admin = AdminClient({"bootstrap.servers": node.server.kafka})
        for resource in (
            ConfigResource(ConfigResource.Type.BROKER, "1"),
            ConfigResource(ConfigResource.Type.GROUP, "sealed"),
        ):
            (response,) = admin.describe_configs([resource]).values()
            entries = response.result(WAIT_S)
            shown.append(str({name: entry.value for name, entry in entries.items()}))
            hidden = {name for name, entry in entries.items() if entry.is_sensitive}
            assert hidden <= {SECRET, HEADERS, "pipelines-spark"}
            assert hidden
            assert all(entries[name].value is None for name in hidden)
        assert node.hook.url in "".join(shown)
        node.server.stop()
        stored = everything_in(node.server.data)
        assert node.hook.url.encode() in stored
        everywhere = stored + node.server.log.read_bytes() + "".join(shown).encode()
        for secret in (WORD, BEARER, SPARK_WORD):
            assert secret.encode() not in everywhere


async def test_a_missing_key_parks_only_push_with_that_secret(tmp_path: Path) -> None:
    async with pushing(tmp_path) as node:
        await node.create("lost")
        await node.publish("lost", "before")
        await node.arrived("before")
        node.server.stop()
        key_file = node.keys.rename(node.keys.with_name("elsewhere"))
        key_id = key_file.read_text().splitlines()[-1].split()[0]
        assert call_command(["secrets", "init", "--file", str(node.keys)]).code == 0
        node.server.start()
        reason = await node.parked("lost")
        assert key_id in reason
        assert str(node.keys) in reason
        (warning,) = (await node.run("cluster", "status", "--json")).document["warnings"]
        assert warning.startswith("subscription 'lost': ")
        assert SECRET in warning
        # Endpoints with available secrets are pushed to; other changes keep sealed ones.
        await node.create("other")
        await node.publish("other", "next")
        await node.arrived("next")
        await node.run("subscription", "update", "lost", "--attempts", 3)
        await node.publish("lost", "after")
        assert b"after" not in node.hook.bodies
        # The key is restored beside the new one, without a restart.
        node.keys.write_bytes(key_file.read_bytes() + node.keys.read_bytes())
        await node.arrived("after")
        document = (await node.run("secrets", "list", "--json")).document
        assert {(secret["name"], secret["problem"]) for secret in document["secrets"]} == {("lost", ""), ("other", "")}
        assert key_id in {secret["key"] for secret in document["secrets"]}


async def test_keys_are_rotated_while_messages_are_pushed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    first = call_command(["secrets", "init", "--file", str(keys), "--json"]).document["key"]
    assert call_command(["secrets", "init", "--file", str(keys)]).code == 5
    async with pushing(tmp_path, **{"secrets-key-file": keys}) as node:
        await node.create("rotated")
        assert {secret["key"] for secret in (await node.run("secrets", "list", "--json")).document["secrets"]} == {
            first
        }
        second = call_command(["secrets", "rotate", "--file", str(keys), "--json"]).document["key"]
        await node.publish("rotated", "one")
        await node.arrived("one")
        done = (await node.run("secrets", "reseal", "--json")).document
        assert (done["newest"], done["resealed"]) == (second, 2)
        assert {secret["key"] for secret in done["secrets"]} == {second}
        keys.write_text(keys.read_text().splitlines()[-1] + "\n")
        node.server.restart()
        await node.publish("rotated", "two")
        await node.arrived("two")
        assert "Sealed 0 secrets" in (await node.run("secrets", "reseal")).out


def test_a_secret_is_never_a_process_argument(server: Server) -> None:
    command = CommandLine(server.kafka)
    create = ("subscription", "create", "argued", "--topic", "argued", "--push", "https://example.com")
    for flags in (
        ("--push-secret", WORD),
        ("--push-header", f"Authorization=Bearer {BEARER}"),
        ("--push-header", f"X-Api-Key={BEARER}"),
        ("--set", f"{SECRET}={WORD}"),
        ("--set", f"{HEADERS}={{}}"),
    ):
        refused = command(*create, *flags)
        assert refused.code == 2
        assert "@FILE" in refused.err
        assert WORD not in refused.err
    refused = command(
        "pipeline", "create", "land", "argued", "--topic", "argued", "--set", f'lake.options={{"a": "{WORD}"}}'
    )
    assert refused.code == 2
    assert WORD not in refused.err
    piped = command.process(*create, "--push-secret", "@-", stdin=WORD.encode())
    assert piped.code == 0, piped.err
    described = command("subscription", "describe", "argued", "--json").document
    assert described["overrides"][SECRET] == "(hidden)"
    assert described["settings"][URL] == "https://example.com"
    assert command("subscription", "delete", "argued", "--yes").code == 0


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_node_refuses_keys_readable_by_others(tmp_path: Path, mode: int) -> None:
    keys = tmp_path / "keys"
    assert call_command(["secrets", "init", "--file", str(keys)]).code == 0
    keys.chmod(mode)
    data, any_port = str(tmp_path / "data"), "127.0.0.1:0"
    refused = call_command(
        ["serve", "--data", data, "--kafka", any_port, "--http", any_port, "--secrets-key-file", str(keys)]
    )
    assert refused.code == 2
    assert "chmod 600" in refused.err
