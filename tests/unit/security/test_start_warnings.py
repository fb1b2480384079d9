"""Startup warnings about settings that are probably mistakes."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.net.listener import bind
from millstream.broker.security.listeners import Listeners
from millstream.broker.security.state import SecurityState
from millstream.core.config import Config
from millstream.core.credential import new_credentials
from millstream.core.errors import AddressTaken

NOBODY = "there is no user, no access rule and no super user"
REQUIRED = {"auth": "required"}


@pytest.mark.parametrize(
    ("flags", "has_users", "warning"),
    [
        ({}, False, ""),
        ({}, True, ""),
        ({"super-users": "admin"}, False, "--super-users has no effect without --auth required"),
        ({"insecure": True, "kafka": "0.0.0.0:9092"}, True, "there are users, but no client has to sign in"),
        ({"insecure": True, "kafka": "0.0.0.0:9092"}, False, ""),
        (REQUIRED, False, NOBODY),
        (REQUIRED, True, ""),
        ({**REQUIRED, "super-users": "User:CN=ops"}, False, ""),
        ({**REQUIRED, "kafka": "0.0.0.0:9092"}, True, "0.0.0.0:9092 requires authentication without TLS"),
        ({**REQUIRED, "kafka": "0.0.0.0:9092", "tls-cert": "node.pem", "tls-key": "node.key"}, True, ""),
    ],
)
async def test_a_probable_mistake_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, object], has_users: bool, warning: str
) -> None:
    catalog = Catalog.open_folder(tmp_path)
    state = SecurityState(CatalogDeclarations(catalog), ())
    if has_users:
        await state.change_users(new_credentials("alice", "alice-password"))
    Listeners(Config.load(flags=flags, environment={}, file=None)).warn(state)
    catalog.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == bool(warning)
    assert warning in "".join(warnings)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ('kafka = "{}"', "pass another address with --kafka HOST:PORT"),
        ('kafka = "127.0.0.1:0"\n[[listeners]]\nname = "lan"\naddress = "{}"', "change the address of listener 'lan'"),
    ],
)
def test_an_address_that_is_taken_names_where_it_is_set(tmp_path: Path, settings: str, remedy: str) -> None:
    file = tmp_path / "node.toml"
    taken = bind("127.0.0.1", 0, flag="kafka")
    try:
        file.write_text(settings.format(f"127.0.0.1:{taken.getsockname()[1]}"))
        listeners = Listeners(Config.load(environment={}, file=file))
        with pytest.raises(AddressTaken, match=re.escape(remedy)):
            listeners.bind()
        listeners.close()
    finally:
        taken.close()
