"""Secrets in the catalog: sealed with a key from a file, bound to their field, and resealed when the key is rotated."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from uuid import uuid4

import pytest

from millstream.broker.catalog.catalog import CATALOG_NAME, Catalog
from millstream.broker.catalog.sealing import Sealing, SecretKey, default_key_file, read_keys, write_keys
from millstream.core.errors import InvalidSetting
from millstream.core.pipeline import LAKE_OPTIONS, Pipeline, PipelineKind
from millstream.core.push import HEADERS, SECRET, URL
from millstream.core.subscription import Subscription

PASSWORD = "a-password-that-nobody-else-knows"
OPTIONS = f'{{"AWS_SECRET_ACCESS_KEY": "{PASSWORD}"}}'


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys" / "secrets.keys"
    path.parent.mkdir()
    write_keys(path, [SecretKey.new()])
    return path


def rotate(path: Path) -> SecretKey:
    key = SecretKey.new()
    write_keys(path, [*read_keys(path), key], replace=True)
    return key


def pushed(name: str) -> Subscription:
    overrides = {URL: "https://example.com/hook", SECRET: PASSWORD, HEADERS: f'{{"Authorization": "{PASSWORD}"}}'}
    return Subscription(name=name, subscription_id=uuid4(), topics=("orders",), overrides=overrides, created_ms=1)


def landing(name: str) -> Pipeline:
    return Pipeline(
        pipeline_id=uuid4(), name=name, kind=PipelineKind.LAND, overrides={"topics": "orders", LAKE_OPTIONS: OPTIONS}
    )


def opened(folder: Path, key_file: Path | None) -> Catalog:
    folder.mkdir(exist_ok=True)
    return Catalog.open_folder(folder, sealing=Sealing(key_file))


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_secrets_are_sealed_in_the_catalog_and_open_with_the_key(tmp_path: Path, key_file: Path) -> None:
    catalog = opened(tmp_path / "data", key_file)
    subscription, pipeline = pushed("billing"), landing("lake")
    catalog.add_subscription(subscription)
    catalog.add_pipeline(pipeline)
    assert catalog.subscriptions() == [subscription] == catalog.subscriptions_named(["billing"])
    assert catalog.pipelines() == [pipeline]
    assert catalog.pipeline_named("lake") == pipeline
    assert b"example.com/hook" in everything_in(tmp_path / "data")
    assert PASSWORD.encode() not in everything_in(tmp_path / "data")
    catalog.close()
    again = opened(tmp_path / "data", key_file)
    assert again.subscriptions() == [subscription]
    assert PASSWORD not in repr(again.subscriptions()) + repr(again.pipelines()) + repr(subscription.settings)


def test_without_the_key_a_secret_stays_sealed_and_survives_changes(tmp_path: Path, key_file: Path) -> None:
    subscription = pushed("billing")
    opened(tmp_path / "data", key_file).add_subscription(subscription)
    stranger = opened(tmp_path / "data", None)
    (found_subscription,) = stranger.subscriptions()
    assert found_subscription.overrides == {URL: "https://example.com/hook"}
    assert set(found_subscription.sealed) == {SECRET, HEADERS}
    assert "--secrets-key-file" in found_subscription.sealed[SECRET].problem
    assert found_subscription.shown_overrides()[SECRET] == "(hidden)"
    stranger.alter_subscription(found_subscription.subscription_id, lambda now: dataclasses.replace(now, used_ms=7))
    (back,) = opened(tmp_path / "data", key_file).subscriptions()
    assert back == dataclasses.replace(subscription, used_ms=7)


def test_without_a_key_no_secret_is_stored(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "data", None)
    with pytest.raises(InvalidSetting, match="secrets-key-file"):
        catalog.add_subscription(pushed("billing"))
    with pytest.raises(InvalidSetting, match="millstream secrets init"):
        catalog.add_pipeline(landing("lake"))
    assert (catalog.subscriptions(), catalog.pipelines()) == ([], [])


def test_another_key_is_named_by_its_id(tmp_path: Path, key_file: Path) -> None:
    opened(tmp_path / "data", key_file).add_subscription(pushed("billing"))
    (key,) = read_keys(key_file)
    write_keys(key_file, [SecretKey.new()], replace=True)
    (subscription,) = opened(tmp_path / "data", key_file).subscriptions()
    assert key.key_id in subscription.sealed[SECRET].problem
    assert str(key_file) in subscription.sealed[SECRET].problem


@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_keys_are_rotated_while_the_catalog_is_open(
    tmp_path: Path, key_file: Path, store: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("postgres").new_database() if store == "postgresql" else ""

    def open_again() -> Catalog:
        if not url:
            return opened(tmp_path / "data", key_file)
        shared = Catalog(url, sealing=Sealing(key_file))
        shared.prepare()
        request.addfinalizer(shared.close)
        return shared

    catalog = open_again()
    subscription, pipeline = pushed("billing"), landing("lake")
    catalog.add_subscription(subscription)
    catalog.add_pipeline(pipeline)
    old = read_keys(key_file)[0].key_id
    new = rotate(key_file).key_id
    # An unchanged secret stays sealed with the key that other nodes have.
    catalog.alter_subscription(subscription.subscription_id, lambda now: dataclasses.replace(now, used_ms=7))
    assert {secret.key_id for secret in catalog.secrets()} == {old}
    assert catalog.reseal() == 3
    assert {secret.key_id for secret in catalog.secrets()} == {new}
    assert catalog.reseal() == 0
    write_keys(key_file, read_keys(key_file)[-1:], replace=True)
    later = open_again()
    assert later.subscriptions() == [dataclasses.replace(subscription, used_ms=7)]
    assert later.pipelines() == [pipeline]
    assert [secret.problem for secret in later.secrets()] == ["", "", ""]


def test_a_secret_moved_to_another_field_does_not_open(tmp_path: Path, key_file: Path) -> None:
    sealing = Sealing(key_file)
    sealed = sealing.seal_all(pushed("billing"))
    stolen = dataclasses.replace(pushed("mine"), overrides=sealed)
    swapped = dataclasses.replace(pushed("billing"), overrides={**sealed, SECRET: sealed[HEADERS]})
    damaged = dataclasses.replace(pushed("billing"), overrides={**sealed, SECRET: sealed[SECRET][:-8] + "AAAAAAA="})
    plain = dataclasses.replace(pushed("billing"), overrides={**sealed, SECRET: PASSWORD})
    assert set(sealing.open_all(stolen).sealed) == {SECRET, HEADERS}
    for document in (swapped, damaged, plain):
        assert set(sealing.open_all(document).sealed) == {SECRET}


def test_two_seals_of_one_secret_differ(key_file: Path) -> None:
    sealing = Sealing(key_file)
    assert sealing.seal(PASSWORD, "a", "b", "c") != sealing.seal(PASSWORD, "a", "b", "c")


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, key_file: Path) -> None:
    key_file.chmod(0o644)
    with pytest.raises(InvalidSetting, match="chmod 600"):
        Sealing.of_node(str(key_file), str(tmp_path / "data"), in_cluster=False)
    key_file.chmod(0o600)
    Sealing.of_node(str(key_file), str(tmp_path / "data"), in_cluster=False)


def test_a_damaged_key_file_is_refused_without_revealing_a_key(tmp_path: Path, key_file: Path) -> None:
    line = key_file.read_bytes().splitlines()[-1]
    for content in (b"", line[:-6] + b"\n", b"0" * 12 + line[12:] + b"\n", b"words\n"):
        key_file.write_bytes(content)
        with pytest.raises(InvalidSetting) as refused:
            read_keys(key_file)
        assert line.split()[1][:20].decode() not in str(refused.value)


def test_a_configured_key_file_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="millstream secrets init"):
        Sealing.of_node(str(tmp_path / "keys"), str(tmp_path / "data"), in_cluster=False)
    assert not (tmp_path / "keys").exists()


def test_a_key_in_the_data_folder_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_keys(data / "secrets.keys", [SecretKey.new()])
    with pytest.raises(InvalidSetting, match="data folder"):
        Sealing.of_node(str(data / "secrets.keys"), str(data), in_cluster=False)


def test_a_single_node_creates_a_key_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = default_key_file()
    assert path == tmp_path / "state" / "millstream" / "secrets.keys"
    sealing = Sealing.of_node("", str(tmp_path / "data"), in_cluster=False)
    assert not path.exists()
    sealed = sealing.seal(PASSWORD, "subscription", "billing", SECRET)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o077 == 0
    other = Sealing.of_node("", str(tmp_path / "other"), in_cluster=False)
    assert other.open(sealed, "subscription", "billing", SECRET) == PASSWORD
    # A key that is backed up with the data would protect nothing.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "data"))
    with pytest.raises(InvalidSetting, match="secrets-key-file"):
        Sealing.of_node("", str(tmp_path / "data"), in_cluster=False).seal(PASSWORD, "a", "b", "c")


def test_the_catalog_file_is_private(tmp_path: Path, key_file: Path) -> None:
    opened(tmp_path / "data", key_file)
    assert os.stat(tmp_path / "data" / CATALOG_NAME).st_mode & 0o077 == 0
