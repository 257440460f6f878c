"""``odq token`` makes tokens that a server takes."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from typer.testing import CliRunner

import opendata_queue
from opendata_queue import StoreAccessError
from opendata_queue.cli import app
from tests.support.broker import BrokerProcess

SECRET = "a secret that is long enough for HS256"


def odq(*arguments: str, secret: str | None = SECRET, code: int = 0) -> str:
    environment = {} if secret is None else {"ODQ_JWT_SECRET": secret}
    shown = CliRunner(env=environment).invoke(app, ["token", *arguments])
    assert shown.exit_code == code, shown.output
    return (shown.stderr if code else shown.stdout).strip()


def test_a_token_opens_its_namespace_and_no_other(tmp_path: Path) -> None:
    admin = odq("--namespace", "*", "--action", "admin")
    token = odq("-n", "shop", "--expires", "1h")
    with BrokerProcess(f"file://{tmp_path}/root", environment={"ODQ_JWT_SECRET": SECRET}) as broker:
        with opendata_queue.open(broker.url, token=admin) as system:
            system.create_queue("shop/orders")
        with opendata_queue.open(broker.url, token=token) as system:
            system.publish(b"x")
            assert len(system.claim("shop/orders", wait_ms=60_000)) == 1
            with pytest.raises(StoreAccessError, match="admin"):
                system.create_queue("shop/more")
            with pytest.raises(StoreAccessError, match="namespace"):
                system.claim("bank/orders")
        bearer = {"Authorization": f"Bearer {admin}"}
        assert httpx.get(f"{broker.url}/metrics", headers=bearer, timeout=120).status_code == 200


@pytest.mark.parametrize("kind", ["rsa", "ec"])
def test_a_private_key_signs_for_the_public_one(tmp_path: Path, kind: str) -> None:
    key = (
        rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
        if kind == "rsa"
        else ec.generate_private_key(ec.SECP256R1())
    )
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    pem = serialization.Encoding.PEM
    private.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    token = odq("-n", "*", "--key-file", str(private), secret=None)
    assert "public key" in odq("-n", "*", "--key-file", str(public), secret=None, code=2)

    with (
        BrokerProcess("memory:///", "--jwt-key-file", str(public)) as broker,
        opendata_queue.open(broker.url, token=token) as system,
    ):
        assert system.publish(b"x") == 0


def test_what_a_token_says_can_be_seen() -> None:
    told = json.loads(odq("-n", "a", "-n", "b", "-a", "publish", "--audience", "us", "--json"))

    assert told["namespaces"] == ["a", "b"]
    assert told["actions"] == ["publish"]
    assert told["aud"] == "us"
    assert told["exp"] - told["iat"] == 86_400


@pytest.mark.parametrize(
    ("arguments", "secret", "said"),
    [
        ((), SECRET, "say for which namespaces"),
        (("-n", "a", "-a", "fly"), SECRET, "'fly' is no action"),
        (("-n", "a", "--expires", "0s"), SECRET, "no time at all"),
        (("-n", "a"), None, "ODQ_JWT_SECRET"),
        (("-n", "a"), "short", "less than 32 bytes"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], secret: str | None, said: str) -> None:
    assert said in odq(*arguments, secret=secret, code=2)
