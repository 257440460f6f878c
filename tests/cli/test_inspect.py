"""``odq inspect`` as a person or a script uses it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from odq_encodings import InlinePayload, MessageMetadata, MetadataLogKey, PayloadKey
from opendata_queue.cli import app

runner = CliRunner(env={"COLUMNS": "160"})


def test_a_row_is_shown_field_by_field_with_offsets_and_meaning() -> None:
    key = MetadataLogKey(sequence=7).encode()
    value = MessageMetadata(
        message_id=(3 << 32) | 7,
        created_at=1_700_000_000_123,
        received_at=1_700_000_000_456,
        visible_at=0,
        retention_seconds=0,
        headers=(("tür", "açık"),),
    ).encode()

    shown = runner.invoke(app, ["inspect", "hex", key.hex(), value.hex()])

    assert shown.exit_code == 0, shown.output
    for expected in (
        "MetadataLogKey",
        "opendata-queue/messages/metadata",
        "MessageMetadata",
        "shard 3, sequence 7",
        "2023-11-14T22:13:20.123Z",
        "for ever",
        "'tür'",
        "headers[0].value",
        "│     43 │",
    ):
        assert expected in shown.output


def test_json_has_every_field_and_keeps_all_digits() -> None:
    key = PayloadKey(message_id=2**64 - 1).encode()
    value = InlinePayload(data=b"hi").encode()

    shown = runner.invoke(app, ["inspect", "hex", "--json", key.hex(" "), f"0x{value.hex(':')}"])

    of_key, of_value = json.loads(shown.output)
    assert of_key["fields"][-1] == {
        "offset": 2,
        "hex": "ff" * 8,
        "name": "message_id",
        "type": "u64 BE",
        "value": "18446744073709551615",
        "meaning": "shard 4294967295, sequence 4294967295",
    }
    assert of_value["fields"][-1]["value"] == "6869"
    assert of_value["error"] is None


def test_a_broken_row_is_read_as_far_as_it_goes_and_says_where_it_breaks() -> None:
    shown = runner.invoke(app, ["inspect", "hex", "01010000000000000102", "01030068"])

    assert shown.exit_code == 1
    assert "data.count" in shown.output
    assert "broken: Payload.data at offset 3: needs 3 bytes, 1 left" in shown.output


def test_a_key_can_be_inspected_alone() -> None:
    shown = runner.invoke(app, ["inspect", "key", "01026f726465727300"])

    assert shown.exit_code == 0
    assert "ActiveMessagesKey" in shown.output
    assert "b'orders'" in shown.output


def test_a_key_of_a_newer_version_is_refused_by_its_number() -> None:
    shown = runner.invoke(app, ["inspect", "key", "0202"])

    assert shown.exit_code == 1
    assert "key.version at offset 0: version 02 is not 01" in shown.output


def test_a_value_can_be_inspected_by_its_name_and_from_standard_input() -> None:
    shown = runner.invoke(
        app, ["inspect", "value", "SeqBlock", "-"], input="00" * 15 + "0\n" + "5\n"
    )

    assert shown.exit_code == 0
    assert "block_size" in shown.output


def test_long_arrays_are_cut_and_say_so() -> None:
    value = "8000" + "00" * 18 * 128

    short = runner.invoke(app, ["inspect", "value", "DoneMessages", value])
    whole = runner.invoke(app, ["inspect", "value", "DoneMessages", "--all", value])

    assert "more fields; --all shows them" in short.output
    assert "messages[127].attempts" in whole.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["hex", "0g", "00"], "'g' is no hex digit (digit 2)"),
        (["hex", "010", "00"], "3 hex digits are an odd number"),
        (["value", "Payloads", "00"], "'Payloads' is not one of: ActiveMessages,"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], complaint: str) -> None:
    shown = runner.invoke(app, ["inspect", *arguments])

    assert shown.exit_code == 2
    assert complaint in shown.output


def test_the_version_is_printed() -> None:
    assert runner.invoke(app, ["--version"]).output.startswith("odq 0.")
