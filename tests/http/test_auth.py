"""Tokens, and the walls between namespaces."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote_plus

import httpx
import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from opendata_queue import AsyncSystem, InvalidInputError
from opendata_queue.http.auth.namespaces import confine, given_filter
from opendata_queue.http.auth.tokens import Gate, check_address
from opendata_queue.http.settings import ServerSettings
from opendata_queue.testing import ManualClock
from tests.http.conftest import HOUR, SECRET, Serving

Token = Callable[..., dict[str, str]]

EMPTY = ""  # a payload, in base64


async def ask(
    client: httpx.AsyncClient, headers: dict[str, str], operation: str, **arguments: object
) -> httpx.Response:
    return await client.post(f"/v1/{operation}", json=arguments, headers=headers)


# --- tokens ---------------------------------------------------------------------------------------


async def test_a_request_without_a_token_is_refused(guarded: httpx.AsyncClient) -> None:
    for headers in ({}, {"Authorization": "Basic abc"}, {"Authorization": "Bearer "}):
        answer = await ask(guarded, headers, "list_queues")

        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("text", ["x", "a.b.c", "é.é.é", "." * 9_000])
async def test_a_broken_token_is_refused(guarded: httpx.AsyncClient, text: str) -> None:
    answer = await ask(guarded, {"Authorization": f"Bearer {text}".encode()}, "list_queues")  # type: ignore[dict-item]

    assert answer.status_code == 401


async def test_a_token_signed_by_somebody_else_is_refused(
    guarded: httpx.AsyncClient, token: Token
) -> None:
    forged = token("*", key="another secret that is also long enough")

    assert (await ask(guarded, forged, "list_queues")).status_code == 401


async def test_a_token_without_a_signature_is_refused(
    guarded: httpx.AsyncClient, clock: ManualClock
) -> None:
    claims = {"namespaces": ["*"], "actions": ["admin"], "exp": clock.now_ms() // 1000 + HOUR}
    unsigned = jwt.encode(claims, "", "none")

    answer = await ask(guarded, {"Authorization": f"Bearer {unsigned}"}, "list_queues")

    assert answer.status_code == 401


async def test_a_token_is_good_until_it_expires(
    guarded: httpx.AsyncClient, token: Token, clock: ManualClock
) -> None:
    headers = token("*")
    assert (await ask(guarded, headers, "list_queues")).status_code == 200

    clock.advance_ms(HOUR * 1_000)

    answer = await ask(guarded, headers, "list_queues")
    assert answer.status_code == 401
    assert "expired" in answer.json()["message"]


@pytest.mark.parametrize(
    "claims",
    [
        *({"exp": None}, {"exp": 0}, {"exp": "soon"}, {"nbf": 1 << 40}, {"namespaces": [5]}),
        *({"exp": float("nan")}, {"exp": float("inf")}, {"exp": 1e300}, {"exp": 1 << 400}),
        *({"exp": True}, {"exp": -1}, {"exp": [1 << 40]}, {"exp": "9999999999"}),
        *({"nbf": float("nan")}, {"nbf": float("-inf")}, {"nbf": -1}, {"nbf": False}),
        *({"iat": float("nan")}, {"iat": "now"}, {"iat": True}, {"sub": 5}, {"sub": ["a"]}),
    ],
)
async def test_a_token_with_bad_claims_is_refused(
    guarded: httpx.AsyncClient, token: Token, claims: dict[str, object]
) -> None:
    assert (await ask(guarded, token("*", **claims), "list_queues")).status_code == 401


async def test_a_token_for_another_audience_is_refused(serving: Serving, token: Token) -> None:
    async with serving(jwt_key=SECRET, jwt_audience="orders") as client:
        assert (await ask(client, token("*"), "list_queues")).status_code == 401
        assert (await ask(client, token("*", aud="emails"), "list_queues")).status_code == 401
        assert (await ask(client, token("*", aud="orders"), "list_queues")).status_code == 200


async def test_a_broker_without_an_audience_takes_no_token_for_one(
    guarded: httpx.AsyncClient, token: Token
) -> None:
    answer = await ask(guarded, token("*", aud="billing"), "list_queues")

    assert answer.status_code == 401
    assert "audience" in answer.json()["message"]


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
async def test_tokens_can_be_signed_with_a_private_key(
    serving: Serving, token: Token, algorithm: str
) -> None:
    private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey = (
        rsa.generate_private_key(65_537, 2_048)
        if algorithm == "RS256"
        else ec.generate_private_key(ec.SECP256R1())
    )
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    async with serving(jwt_key=public.decode()) as client:
        good = token("*", key=private, algorithm=algorithm)
        assert (await ask(client, good, "list_queues")).status_code == 200
        # The public key, which everybody knows, taken for a shared secret.
        confused = _signed_with_hs256(public, json.dumps({"exp": 1 << 40, "namespaces": ["*"]}))
        assert (await ask(client, confused, "list_queues")).status_code == 401


def _signed_with_hs256(key: bytes, claims: str) -> dict[str, str]:
    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    head = b'{"alg":"HS256","typ":"JWT"}'
    signed = f"{part(head)}.{part(claims.encode())}"
    signature = hmac.new(key, signed.encode(), hashlib.sha256).digest()
    return {"Authorization": f"Bearer {signed}.{part(signature)}"}


def test_a_short_secret_and_a_private_key_are_refused(clock: ManualClock) -> None:
    for key in ("short", "-----BEGIN PRIVATE KEY-----"):
        with pytest.raises(InvalidInputError):
            Gate(ServerSettings(jwt_key=key), clock)


def public_keys() -> Iterator[str]:
    """What everybody may know of a key, in forms that are no PEM."""
    for private in (
        rsa.generate_private_key(65_537, 2_048),
        ec.generate_private_key(ec.SECP256R1()),
    ):
        public = private.public_key()
        der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        yield base64.b64encode(der).decode()
        yield base64.encodebytes(der).decode()
        yield base64.urlsafe_b64encode(der).decode().rstrip("=")
        yield der.hex()
        yield public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        yield f"# our key\n{pem}"
        yield from _rarer_forms(der, pem, public)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
        request = x509.CertificateSigningRequestBuilder().subject_name(name)
        signed = request.sign(private, SHA256())
        yield base64.b64encode(signed.public_bytes(Encoding.DER)).decode()
        certificate = (
            x509.CertificateBuilder(name, name, public, 1)
            .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
            .not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
            .sign(private, SHA256())
        )
        for encoding in (Encoding.DER, Encoding.PEM):
            data = certificate.public_bytes(encoding)
            yield base64.b64encode(data).decode()
            yield data.hex(":")
        numbers = public.public_numbers()
        if isinstance(numbers, rsa.RSAPublicNumbers):
            yield f"Modulus={numbers.n:X}"
        else:
            point = public.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
            yield base64.b64encode(point).decode()
            yield point.hex(":")
    jwk = json.dumps({"kty": "RSA", "n": "x" * 300, "e": "AQAB"})
    yield jwk
    yield json.dumps(jwk)
    yield json.dumps({"keys": [json.loads(jwk)]})
    yield base64.b64encode(jwk.encode()).decode()
    yield base64.b64encode(base64.b64encode(jwk.encode())).decode()


def _rarer_forms(der: bytes, pem: str, public: Any) -> Iterator[str]:
    for text in (pem, pem.replace("\n", "\r\n"), f"\ufeff{pem}"):
        yield base64.b64encode(text.encode()).decode()
        yield base64.encodebytes(text.encode()).decode()
        yield text.encode().hex()
    yield base64.b64encode(base64.b64encode(pem.encode())).decode()
    yield "data:application/x-pem-file;base64," + base64.b64encode(pem.encode()).decode()
    yield "".join(line for line in pem.splitlines() if "-----" not in line)
    yield "\\n".join(line for line in pem.splitlines() if "-----" not in line)
    yield json.dumps(pem)
    yield quote_plus(pem)
    yield der.hex(":")
    yield der.hex(":").upper()
    yield der.hex(" ")
    yield "0x" + der.hex()
    yield base64.b64encode(der.hex().encode()).decode()
    ssh = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    kind, blob = ssh.split()
    yield f"{ssh} me@here"
    yield f'from="10.0.0.0/8",no-pty {ssh} me@here'
    yield f"broker.example.com {kind} {blob}"
    yield blob
    yield base64.b64encode(ssh.encode()).decode()
    yield f"---- BEGIN SSH2 PUBLIC KEY ----\n{blob}\n---- END SSH2 PUBLIC KEY ----"


def test_a_public_key_is_never_taken_for_a_secret(clock: ManualClock) -> None:
    for key in public_keys():
        with pytest.raises(InvalidInputError, match="key for tokens is no secret"):
            Gate(ServerSettings(jwt_key=key), clock)


@pytest.mark.parametrize(
    "key",
    [
        "change me, to 32 random bytes or more",
        "CHANGE_ME_CHANGE_ME_CHANGE_ME_CHANGE_ME",
        "changeme-changeme-changeme-changeme",
        "a secret for trying it out, not for more",
    ],
)
def test_the_placeholder_of_an_example_is_no_secret(clock: ManualClock, key: str) -> None:
    with pytest.raises(InvalidInputError, match="placeholder of an example"):
        Gate(ServerSettings(jwt_key=key), clock)


def test_random_secrets_of_every_form_are_taken(clock: ManualClock) -> None:
    data = hashlib.sha512(b"random").digest()
    for key in (
        *(data.hex(), data.hex(":"), base64.b64encode(data).decode()),
        *("correct horse battery staple " * 2, "a" * 64, "00" * 65, "=" * 40, "0x" * 20, ":" * 32),
        *(base64.b64encode(data.hex().encode()).decode(), "\x00\xe9\u20ac" * 20, "-" * 64),
    ):
        Gate(ServerSettings(jwt_key=key), clock)


@pytest.mark.parametrize(
    "head",
    [
        "[" * 3_000,
        '{"alg":["HS256"]}',
        '{"alg":{"a":1},"typ":5}',
        '{"alg":"HS256","crit":["exp"]}',
        '{"alg":"HS256","kid":5}',
        '{"alg":"HS256","b64":false}',
        "[]",
        "5",
        "null",
        '{"alg":"HS256","x":NaN}',
    ],
)
async def test_a_token_with_a_strange_head_is_refused(
    guarded: httpx.AsyncClient, head: str
) -> None:
    """It is read before the signature is checked: anybody can send one."""
    strange = base64.urlsafe_b64encode(head.encode()).rstrip(b"=").decode()

    answer = await ask(guarded, {"Authorization": f"Bearer {strange}.e30.AAAA"}, "list_queues")

    assert answer.status_code == 401


async def test_a_confined_token_does_not_learn_of_the_consumers_of_others(
    guarded: httpx.AsyncClient, token: Token
) -> None:
    everything = token("*")
    for queue in ("shop/orders", "audit/everything", "all"):
        assert (await ask(guarded, everything, "create_queue", queue=queue)).status_code == 200
    await ask(guarded, everything, "update_queue", queue="all", filter="namespace = 'shop'")
    message = {"payload": EMPTY, "headers": {"namespace": "shop"}}
    answer = await ask(guarded, everything, "publish", messages=[message])
    (message_id,) = answer.json()["message_ids"]
    for queue, consumer in (("all", "their-secret-worker"), ("shop/orders", "ours")):
        body = {"queue": queue, "count": 1, "consumer": consumer, "wait_ms": 10_000}
        claimed = await ask(guarded, everything, "claim", **body)
        assert len(claimed.json()["messages"]) == 1

    seen = await ask(guarded, token("shop"), "history", message_id=message_id)
    seen_by_all = await ask(guarded, everything, "history", message_id=message_id)

    assert "their-secret-worker" not in seen.text
    assert seen.json()["history"]["consumers"] == ["ours"]
    assert seen_by_all.json()["history"]["consumers"] == ["their-secret-worker", "ours"]


def test_a_key_that_can_check_no_token_is_refused_at_once(clock: ManualClock) -> None:
    other_curve = ec.generate_private_key(ec.SECP384R1()).public_key()
    unfit = other_curve.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    broken = "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"
    for key in (unfit, broken, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"):
        with pytest.raises(InvalidInputError, match="key for tokens"):
            Gate(ServerSettings(jwt_key=key), clock)


def test_without_tokens_only_this_machine_is_listened_to() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_address(ServerSettings(host=host))
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(InvalidInputError, match="without tokens"):
            check_address(ServerSettings(host=host))
        check_address(ServerSettings(host=host, insecure=True))
        check_address(ServerSettings(host=host, jwt_key=SECRET))


def test_a_secret_is_not_shown() -> None:
    assert SECRET not in repr(ServerSettings(jwt_key=SECRET))


# --- actions --------------------------------------------------------------------------------------


async def test_a_token_allows_its_actions_and_no_others(
    guarded: httpx.AsyncClient, token: Token
) -> None:
    publisher = token("a", actions=("publish",))
    consumer = token("a", actions=("consume",))

    assert (await ask(guarded, publisher, "create_queue", queue="a/q")).status_code == 403
    assert (await ask(guarded, consumer, "publish", messages=[])).status_code == 403
    assert (await ask(guarded, publisher, "publish", messages=[])).status_code == 200
    assert (await ask(guarded, publisher, "claim", queue="a/q")).status_code == 403
    assert (await guarded.get("/metrics", headers=token("a"))).status_code == 403
    assert (await guarded.get("/metrics", headers=token("*"))).status_code == 200
    assert (await guarded.get("/metrics")).status_code == 401
    assert (await guarded.get("/healthz")).status_code == 200


# What each operation may be asked with, and the action that release 0.1 took for it.
REQUESTS_OF_0_1: dict[str, tuple[str, dict[str, object]]] = {
    "publish": ("publish", {"messages": []}),
    "read": ("consume", {"message_ids": []}),
    "create_queue": ("admin", {"queue": "a/new"}),
    "update_queue": ("admin", {"queue": "a/q"}),
    "purge_queue": ("admin", {"queue": "a/q"}),
    "delete_queue": ("admin", {"queue": "a/old"}),
    "get_queue": ("consume", {"queue": "a/q"}),
    "list_queues": ("consume", {}),
    "stats": ("consume", {"queue": "a/q"}),
    "peek": ("consume", {"queue": "a/q"}),
    "browse": ("consume", {"queue": "a/q", "state": "done"}),
    "history": ("consume", {"message_id": 1}),
    "claim": ("consume", {"queue": "a/q"}),
    "ack": ("consume", {"queue": "a/q", "receipts": []}),
    "nack": ("consume", {"queue": "a/q", "receipts": []}),
    "release": ("consume", {"queue": "a/q", "receipts": []}),
    "extend": ("consume", {"queue": "a/q", "receipts": []}),
    "failed": ("consume", {"queue": "a/q"}),
    "replay": ("admin", {"queue": "a/q", "all": True}),
    "purge_failed": ("admin", {"queue": "a/q", "all": True}),
}
ONLY_SHOW = {
    *("read", "get_queue", "list_queues", "stats", "peek", "browse", "history", "failed"),
}


@pytest.mark.parametrize("action", ["publish", "consume", "admin"])
async def test_a_token_of_release_0_1_may_do_what_it_could(
    guarded: httpx.AsyncClient, token: Token, action: str
) -> None:
    for queue in ("a/q", "a/old"):
        assert (await ask(guarded, token("a"), "create_queue", queue=queue)).status_code == 200

    for name, (needed, arguments) in REQUESTS_OF_0_1.items():
        answer = await ask(guarded, token("a", actions=(action,)), name, **arguments)

        assert answer.status_code == (200 if action == needed else 403), (name, answer.text)


async def test_a_token_to_view_sees_everything_and_changes_nothing(
    guarded: httpx.AsyncClient, token: Token
) -> None:
    assert (await ask(guarded, token("a"), "create_queue", queue="a/q")).status_code == 200
    dashboard = token("a", actions=("view",))

    for name, (_, arguments) in REQUESTS_OF_0_1.items():
        answer = await ask(guarded, dashboard, name, **arguments)

        assert answer.status_code == (200 if name in ONLY_SHOW else 403), (name, answer.text)
    assert (await ask(guarded, dashboard, "stats", queue="b/q")).status_code == 403
    assert (await guarded.get("/dequeue?queue=a/q", headers=dashboard)).status_code == 403
    assert (await guarded.get("/metrics", headers=dashboard)).status_code == 403


async def test_a_token_finds_messages_in_its_namespaces_and_in_no_others(
    guarded: httpx.AsyncClient, token: Token, system: AsyncSystem
) -> None:
    await system.create_queue("a/open")  # not confined to its namespace
    for one in ("a", "b"):
        created = await ask(guarded, token(one), "create_queue", queue=f"{one}/q")
        assert created.status_code == 200
        messages = [{"payload": "", "headers": {"owner": one, "type": "x"}}]
        assert (await ask(guarded, token(one), "publish", messages=messages)).status_code == 200
    wanted = {"state": "available", "filter": "type = 'x'"}
    dashboard = token("a", actions=("view",))

    own = await ask(guarded, dashboard, "find", queue="a/q", **wanted)
    others = await ask(guarded, dashboard, "find", queue="b/q", **wanted)
    everybodys = await ask(guarded, dashboard, "find", queue="a/open", **wanted)
    publisher = await ask(guarded, token("a", actions=("publish",)), "find", queue="a/q", **wanted)

    assert own.status_code == 200, own.text
    assert [one["headers"]["owner"] for one in own.json()["entries"]] == ["a"]
    assert (own.json()["examined"], own.json()["next"]) == (1, None)
    assert (others.status_code, everybodys.status_code, publisher.status_code) == (403, 403, 403)
    assert "'view'" in publisher.json()["message"]


# --- namespaces -----------------------------------------------------------------------------------


async def test_a_message_gets_the_namespace_of_its_token(
    guarded: httpx.AsyncClient, token: Token, system: AsyncSystem
) -> None:
    published = await ask(guarded, token("a"), "publish", messages=[{"payload": EMPTY}])

    message = await system.read(int(published.json()["message_ids"][0]))

    assert message is not None
    assert dict(message.headers) == {"namespace": "a"}


async def test_a_message_of_another_namespace_is_refused(
    guarded: httpx.AsyncClient, token: Token
) -> None:
    mine = {"payload": EMPTY, "headers": {"namespace": "a"}}
    theirs = {"payload": EMPTY, "headers": {"namespace": "b"}}

    assert (await ask(guarded, token("a"), "publish", messages=[mine, theirs])).status_code == 403
    assert (await ask(guarded, token("a", "b"), "publish", messages=[theirs])).status_code == 200
    unsaid = await ask(guarded, token("a", "b"), "publish", messages=[{"payload": EMPTY}])
    assert unsaid.status_code == 400
    assert (
        await ask(guarded, token(), "publish", messages=[{"payload": EMPTY}])
    ).status_code == 400


async def test_a_queue_only_ever_gets_messages_of_its_namespace(
    guarded: httpx.AsyncClient, token: Token
) -> None:
    filter = "type = 'x' OR namespace = 'b'; TRUE PRIORITY 7"
    made = await ask(guarded, token("a"), "create_queue", queue="a/q", filter=filter)
    for name in ("a", "b"):
        message = {"payload": EMPTY, "headers": {"type": "x"}}
        await ask(guarded, token(name), "publish", messages=[message, {"payload": EMPTY}])

    claimed = (await ask(guarded, token("a"), "claim", queue="a/q", count=10)).json()["messages"]

    assert made.json()["filter"] == filter
    assert [one["headers"]["namespace"] for one in claimed] == ["a", "a"]
    assert sorted(one["priority"] for one in claimed) == [7, 128]
    shown = await ask(guarded, token("a"), "get_queue", queue="a/q")
    assert shown.json()["filter"] == filter


async def test_an_administrator_of_all_confines_queues_too(
    guarded: httpx.AsyncClient, token: Token, system: AsyncSystem
) -> None:
    await ask(guarded, token("*"), "create_queue", queue="a/q")
    await ask(guarded, token("*"), "create_queue", queue="all", filter="x = 'y'")

    assert (await system.get_queue("a/q")).filter == "namespace = 'a'"
    assert (await system.get_queue("all")).filter == "x = 'y'"
    await ask(guarded, token("a"), "update_queue", queue="a/q", filter="x = 'y'")
    assert (await system.get_queue("a/q")).filter == "namespace = 'a' AND x = 'y'"


async def test_what_belongs_to_others_can_not_be_seen_or_touched(
    guarded: httpx.AsyncClient, token: Token
) -> None:
    mine, theirs = token("a"), token("b")
    await ask(guarded, mine, "create_queue", queue="a/q")
    await ask(guarded, token("*"), "create_queue", queue="all")
    published = await ask(guarded, mine, "publish", messages=[{"payload": EMPTY}])
    (message_id,) = published.json()["message_ids"]

    for queue in ("a/q", "a/unknown", "all", "b"):
        for operation, arguments in (
            ("claim", {}),
            ("peek", {}),
            ("stats", {}),
            ("browse", {"state": "available"}),
            ("failed", {}),
            ("get_queue", {}),
            ("update_queue", {"filter": ""}),
            ("purge_queue", {}),
            ("delete_queue", {}),
            ("create_queue", {}),
            ("replay", {"all": True}),
            ("ack", {"receipts": []}),
        ):
            answer = await ask(guarded, theirs, operation, queue=queue, **arguments)
            assert answer.status_code == 403, (operation, queue)
    assert (await ask(guarded, theirs, "read", message_ids=[message_id])).json() == {
        "messages": [None]
    }
    assert (await ask(guarded, theirs, "history", message_id=message_id)).json() == {
        "history": None
    }
    assert (await ask(guarded, theirs, "list_queues")).json() == {"queues": []}
    history = (await ask(guarded, mine, "history", message_id=message_id)).json()["history"]
    assert [one["queue"] for one in history["entries"]] == ["a/q"]


async def test_a_queue_from_before_there_were_tokens_is_closed_until_it_is_confined(
    guarded: httpx.AsyncClient, token: Token, system: AsyncSystem
) -> None:
    await system.create_queue("a/q", filter="x = 'y'")

    refused = await ask(guarded, token("a"), "claim", queue="a/q")
    unchanged = await ask(guarded, token("a"), "update_queue", queue="a/q", filter="x = 'y'")
    await ask(guarded, token("*"), "update_queue", queue="a/q", filter="x = 'y'")
    allowed = await ask(guarded, token("a"), "claim", queue="a/q")

    assert refused.status_code == 403
    assert "not confined" in refused.json()["message"]
    assert unchanged.status_code == 403
    assert allowed.status_code == 200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "TRUE PRIORITY 3",
        "a = 'b'",
        "a = 'b' AND c = 'd'",
        "a = 'b' OR c = 'd'",
        "NOT (a = 'b' AND c = 'd')",
        "namespace = 'ns'",
        "namespace = 'ns' AND a = 'b'",
        "a = 'b' PRIORITY 1; c = 'd' PRIORITY weight; e = 'f'",
    ],
)
def test_a_confined_filter_gives_back_what_was_given(text: str) -> None:
    assert given_filter(confine(text, "ns"), "ns") == text
    assert given_filter(confine(text, "ns"), "other") is None


def test_a_namespace_with_a_quote_stays_a_text() -> None:
    assert confine("a = 'b'", "n's") == "namespace = 'n''s' AND a = 'b'"
