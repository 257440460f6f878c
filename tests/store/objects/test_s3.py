"""S3 is reached the way other AWS tools reach it, and what is wrong is named before it is tried."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from opendata_queue import Engine, StoreAccessError, StoreSettings, StoreUnavailableError
from opendata_queue.store import Objects, S3Access
from tests.conftest import BUCKET
from tests.support.s3_server import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

KEYS = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "secret"}
IMPATIENT = StoreSettings(request_timeout_ms=1_000, outage_timeout_ms=1_000)


def access(home: Path, environment: Mapping[str, str]) -> S3Access:
    return S3Access.from_environment({"HOME": str(home), **environment})


def write_profiles(home: Path, *, credentials: str = "", config: str = "") -> None:
    (home / ".aws").mkdir(exist_ok=True)
    (home / ".aws" / "credentials").write_text(credentials)
    (home / ".aws" / "config").write_text(config)


def test_keys_of_the_environment_come_first(tmp_path: Path) -> None:
    write_profiles(
        tmp_path, credentials="[default]\naws_access_key_id = no\naws_secret_access_key = no\n"
    )

    found = access(tmp_path, KEYS | {"AWS_REGION": "eu-central-1", "AWS_DEFAULT_REGION": "no"})

    assert found.access_key_id is None  # the clients find them themselves
    assert found.region == "eu-central-1"
    assert "AKIA" in found.source


def test_a_profile_gives_keys_region_and_endpoint(tmp_path: Path) -> None:
    write_profiles(
        tmp_path,
        credentials="[shop]\naws_access_key_id=AKIA2\naws_secret_access_key=s/%+\n"
        "aws_session_token = token\n",
        config="[profile shop]\nregion = eu-west-1\nendpoint_url = https://minio.example:9000/\n"
        "s3 =\n  addressing_style = virtual\n",
    )

    found = access(tmp_path, {"AWS_PROFILE": "shop"})

    assert found.options("orders") == {
        "aws_endpoint": "https://orders.minio.example:9000",
        "aws_region": "eu-west-1",
        "aws_access_key_id": "AKIA2",
        "aws_secret_access_key": "s/%+",
        "aws_session_token": "token",
        "aws_virtual_hosted_style_request": "true",
    }
    assert "s/%+" not in repr(found)


def test_the_default_profile_need_not_be_named(tmp_path: Path) -> None:
    write_profiles(
        tmp_path, config="[default]\naws_access_key_id = AKIA3\naws_secret_access_key = x\n"
    )

    assert access(tmp_path, {}).access_key_id == "AKIA3"


def test_profiles_may_be_in_other_files(tmp_path: Path) -> None:
    elsewhere = tmp_path / "keys"
    elsewhere.write_text("[ci]\naws_access_key_id = AKIA4\naws_secret_access_key = x\n")

    found = access(tmp_path, {"AWS_PROFILE": "ci", "AWS_SHARED_CREDENTIALS_FILE": str(elsewhere)})

    assert found.access_key_id == "AKIA4"


@pytest.mark.parametrize(
    ("variables", "endpoint"),
    [
        ({"AWS_ENDPOINT": "http://a:1"}, "http://a:1"),
        ({"AWS_ENDPOINT": "http://a:1", "AWS_ENDPOINT_URL": "http://b:1"}, "http://b:1"),
        ({"AWS_ENDPOINT_URL": "http://b:1", "AWS_ENDPOINT_URL_S3": "http://c:1"}, "http://c:1"),
        ({}, "https://of-services"),
    ],
)
def test_the_most_special_endpoint_counts(
    tmp_path: Path, variables: dict[str, str], endpoint: str
) -> None:
    write_profiles(
        tmp_path,
        config="[default]\nendpoint_url = https://of-all\nservices = mine\n"
        "[services mine]\ns3 =\n  endpoint_url = https://of-services\n",
    )

    found = access(tmp_path, KEYS | variables)

    assert found.endpoint == endpoint
    assert found.allow_http == endpoint.startswith("http://")


def test_without_keys_the_role_of_the_pod_or_machine_counts(tmp_path: Path) -> None:
    assert "machine" in access(tmp_path, {}).source
    assert "pod" in access(tmp_path, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}).source


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"AWS_ACCESS_KEY_ID": "AKIA"}, "AWS_SECRET_ACCESS_KEY is not"),
        ({"AWS_SECRET_ACCESS_KEY": "x"}, "AWS_ACCESS_KEY_ID is not"),
        ({"AWS_SESSION_TOKEN": "x"}, "without the key that it belongs to"),
        ({"AWS_PROFILE": "nobody"}, "there is no such profile in "),
        ({"AWS_PROFILE": "sso"}, "by sso_session, and they end"),
        ({"AWS_PROFILE": "half"}, "'half' has no aws_secret_access_key"),
        (KEYS | {"AWS_ENDPOINT_URL": "minio:9000"}, "AWS_ENDPOINT_URL is 'minio:9000'"),
        (KEYS | {"AWS_ENDPOINT_URL": "http://minio:port"}, "not a URL like"),
        (KEYS | {"AWS_ENDPOINT_URL": "http://a", "AWS_ALLOW_HTTP": "false"}, "has no TLS"),
        (KEYS | {"AWS_CA_BUNDLE": "/no/such.pem"}, "AWS_CA_BUNDLE is '/no/such.pem': No such"),
        (KEYS | {"AWS_CA_BUNDLE": __file__}, "holds no certificate in PEM"),
    ],
)
def test_what_can_not_work_is_named(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    write_profiles(
        tmp_path,
        credentials="[half]\naws_access_key_id = AKIA\n",
        config="[profile sso]\nsso_session = mine\n",
    )

    with pytest.raises(StoreAccessError, match=said.replace("(", "\\(")):
        access(tmp_path, variables)


def test_a_file_of_profiles_that_is_none_is_named(tmp_path: Path) -> None:
    write_profiles(tmp_path, config="region = nowhere\n")

    with pytest.raises(StoreAccessError, match="config can't be read as a file of AWS profiles"):
        access(tmp_path, {"AWS_PROFILE": "x"})


# --- on a real server -----------------------------------------------------------------------------


def set_environment(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


async def test_a_root_is_opened_with_a_profile_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server(check_credentials=True) as server:
        server.create_bucket("private")
        write_profiles(
            tmp_path,
            credentials=f"[shop]\naws_access_key_id = {ACCESS_KEY_ID}\n"
            f"aws_secret_access_key = {SECRET_ACCESS_KEY}\n"
            f"[other]\naws_access_key_id = SOMEBODYELSE\naws_secret_access_key = x\n",
            config=f"[profile shop]\nendpoint_url = {server.endpoint}\nregion = us-east-1\n"
            f"[profile other]\nendpoint_url = {server.endpoint}\nregion = us-east-1\n",
        )
        set_environment(monkeypatch, {"HOME": str(tmp_path), "AWS_PROFILE": "shop"})
        async with await Engine.open("s3://private/root") as system:
            message_id = await system.publish(b"x" * 70_000)
            assert await system.read(message_id) is not None
        set_environment(monkeypatch, {"HOME": str(tmp_path), "AWS_PROFILE": "other"})

        with pytest.raises(StoreAccessError, match="not accepted: nobody has that access key"):
            await Engine.open("s3://private/root")


async def test_an_endpoint_without_a_server_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_environment(monkeypatch, KEYS | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"})

    with pytest.raises(StoreUnavailableError, match="nobody listens there"):
        await Objects.open("s3://bucket/root", IMPATIENT).read("x")


async def test_an_endpoint_that_never_answered_is_not_waited_for_as_in_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With this patience it would take an hour; pytest gives up after minutes."""
    set_environment(monkeypatch, KEYS | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
    patient = Objects.open("s3://bucket/root", StoreSettings(outage_timeout_ms=3_600_000))

    with pytest.raises(StoreUnavailableError, match="nobody listens there"):
        await patient.create("x", b"y")


async def test_a_certificate_of_ones_own_is_trusted_when_its_ca_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: S3Server
) -> None:
    trusted_before = os.environ.get("SSL_CERT_FILE")
    async with tls_in_front_of(s3_server, tmp_path) as port:
        variables = s3_server.environment() | {
            "AWS_ENDPOINT": f"https://127.0.0.1:{port}",
            "AWS_ENDPOINT_URL": f"https://127.0.0.1:{port}",
        }
        set_environment(monkeypatch, variables)
        with pytest.raises(
            StoreAccessError, match="not trusted; name the file of its CA in AWS_CA"
        ):
            await Objects.open(f"s3://{BUCKET}/tls", IMPATIENT).read("x")
        set_environment(monkeypatch, variables | {"AWS_CA_BUNDLE": str(tmp_path / "ca.pem")})

        async with await Engine.open(f"s3://{BUCKET}/tls") as system:
            assert await system.publish(b"x") == 0
        assert os.environ.get("SSL_CERT_FILE") == trusted_before


@contextlib.asynccontextmanager
async def tls_in_front_of(server: S3Server, folder: Path) -> AsyncIterator[int]:
    """A port with TLS before a server without it; its certificate is signed by ``ca.pem``."""
    make_certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    writers: set[asyncio.StreamWriter] = set()
    serving: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                sink.write(data)
                await sink.drain()
        sink.transport.abort()

    async def serve(near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far_in, far_out = await asyncio.open_connection("127.0.0.1", server.port)
        writers.update((near_out, far_out))
        await asyncio.gather(pump(near_in, far_out), pump(far_in, near_out))

    def connected(near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(serve(near_in, near_out)))

    front = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    try:
        yield front.sockets[0].getsockname()[1]
    finally:
        front.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*serving)
        for writer in writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def make_certificates(folder: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    ca_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a CA of our own")])

    def signed(name: x509.Name, key: ec.EllipticCurvePrivateKey, is_ca: bool) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if not is_ca:
            host = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([host]), critical=False)
        return builder.sign(ca_key, hashes.SHA256())

    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(signed(ca_name, ca_key, True).public_bytes(pem))
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the server")])
    (folder / "server.pem").write_bytes(
        server_key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + signed(server_name, server_key, False).public_bytes(pem)
    )
