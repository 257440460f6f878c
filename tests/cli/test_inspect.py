"""``odq inspect`` as a person or a script uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from odq_encodings import (
    AvailableMessage,
    InlinePayload,
    MessageMetadata,
    MetadataLogKey,
    PayloadKey,
    UriPayload,
)
from opendata_queue.cli import app

runner = CliRunner(env={"COLUMNS": "160"})

METADATA = MessageMetadata(
    message_id=(3 << 32) | 7,
    created_at=1_700_000_000_123,
    received_at=1_700_000_000_456,
    visible_at=0,
    retention_seconds=0,
    headers=(("tür", "açık"),),
)


def test_a_row_is_shown_field_by_field_with_offsets_and_meaning() -> None:
    key = MetadataLogKey(sequence=7).encode()
    value = METADATA.encode()

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
        " 43  06 00 ",
        "metadata log entry",
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


@pytest.mark.parametrize(
    ("record", "data", "shown_fields", "hidden_field"),
    [
        (
            "MessageMetadata",
            "0100000000000000020000000000000003",
            ["message_id", "created_at"],
            " received_at ",
        ),
        (
            "DoneMessages",
            "0200" + "010000000000000002000000000000000300" + "0400000000000000" + "05",
            ["messages.count", "messages[0].attempts", "messages[1].message_id"],
            " messages[1].done_at ",
        ),
    ],
)
def test_what_is_whole_in_a_cut_record_is_shown(
    record: str, data: str, shown_fields: list[str], hidden_field: str
) -> None:
    shown = runner.invoke(app, ["inspect", "value", record, data])

    assert shown.exit_code == 1
    assert [name for name in shown_fields if name not in shown.output] == []
    table, _, complaint = shown.output.partition("✗ broken")
    assert hidden_field not in table
    assert hidden_field.strip() in complaint


def test_a_key_that_is_not_known_is_complained_of_once() -> None:
    shown = runner.invoke(app, ["inspect", "hex", "0909", "00"])

    assert shown.exit_code == 1
    assert shown.output.count("broken") == 1
    assert "key.version at offset 0: version 09 is not 01" in shown.output


def test_meanings_of_times_and_kinds() -> None:
    message = AvailableMessage(
        message_id=1, priority=1, visible_at=2**63 - 1, retention_deadline=0, attempts=0
    )
    key = PayloadKey(message_id=1).encode().hex()
    inline, uri = InlinePayload(data=b"").encode().hex(), UriPayload(uri="s3://b/k").encode().hex()

    def meanings(*arguments: str) -> dict[str, str]:
        shown = runner.invoke(app, ["inspect", *arguments, "--json"])
        inspections = json.loads(shown.output)
        return {field["name"]: field["meaning"] for part in inspections for field in part["fields"]}

    of_message = meanings("value", "AvailableMessage", message.encode().hex())
    assert of_message["retention_deadline"] == "never"
    assert of_message["visible_at"] == "beyond the calendar"
    assert of_message["priority"] == ""
    assert meanings("hex", key, inline)["kind"] == "inline bytes"
    assert meanings("hex", key, uri)["kind"] == "URI"
    assert meanings("hex", key, uri)["type"] == "payload"
    assert meanings("key", "01026f726465727300")["type"] == "active messages"


def test_a_long_value_is_cut_in_the_table_and_whole_in_json() -> None:
    value = UriPayload(uri="u" * 200).encode().hex()

    table = runner.invoke(app, ["inspect", "value", "UriPayload", value], env={"COLUMNS": "300"})
    whole = runner.invoke(app, ["inspect", "value", "UriPayload", value, "--json"])

    assert "'" + "u" * 78 + "…" in table.output
    assert "u" * 79 not in table.output
    assert "u" * 200 in whole.output


@pytest.mark.parametrize("columns", ["40", "80", "160"])
def test_markup_in_a_value_is_shown_as_it_is(columns: str) -> None:
    value = UriPayload(uri="[bold]x[/bold] [/oops]").encode().hex()

    shown = runner.invoke(app, ["inspect", "value", "UriPayload", value], env={"COLUMNS": columns})

    assert shown.exit_code == 0
    assert "[bold]x[/bold] [/oops]" in shown.output


@pytest.mark.parametrize("columns", ["50", "80"])
def test_types_numbers_and_times_stay_whole_in_a_narrow_terminal(columns: str) -> None:
    key = MetadataLogKey(sequence=7).encode().hex()
    value = METADATA.encode().hex()

    shown = runner.invoke(app, ["inspect", "hex", key, value], env={"COLUMNS": columns})

    for whole in ("TerminatedBytes", "1700000000123", "2023-11-14T22:13:20.123Z"):
        assert whole in shown.output


def test_a_column_of_meanings_is_there_only_if_one_has_a_meaning() -> None:
    without = runner.invoke(app, ["inspect", "value", "BacklogCount", "00" * 17])
    with_one = runner.invoke(app, ["inspect", "value", "BlobReference", "00" * 8])

    assert "meaning" not in without.output
    assert "meaning" in with_one.output


def test_all_fields_of_a_long_record_come_as_lines() -> None:
    value = "ffff" + "00" * 18 * 65_535

    shown = runner.invoke(app, ["inspect", "value", "DoneMessages", "--all", "-"], input=value)

    lines = shown.output.splitlines()
    assert len(lines) == 1 + 1 + 3 * 65_535
    assert lines[-1] == "1179630  messages[65534].attempts u16 LE  00 00 = 0"


def odq(arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The command as a shell runs it."""
    code = "from opendata_queue.cli import main; main()"
    return subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" inspect {arguments}', sys.executable, code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        check=False,
        timeout=120,
    )


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    source = tmp_path / "done.hex"
    source.write_text("ffff" + "00" * 18 * 65_535)

    shown = odq(f"value DoneMessages --all - <'{source}' | head -n 2")

    assert shown.stdout.splitlines()[1] == b"0  messages.count u16 LE  ff ff = 65535"
    assert shown.stderr == b""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_other_characters_and_no_traceback(encoding: str) -> None:
    shown = odq("hex 0909 00", PYTHONIOENCODING=encoding)

    assert (shown.returncode, shown.stderr) == (1, b"")
    assert b"? broken: key.version" in shown.stdout


def test_a_closed_standard_input_is_complained_of() -> None:
    shown = odq("key - <&-")

    assert shown.returncode == 2
    assert b"standard input is closed" in shown.stderr


def test_binary_standard_input_is_complained_of() -> None:
    shown = runner.invoke(app, ["inspect", "key", "-"], input=b"\xff\xfe\x00")

    assert shown.exit_code == 2
    assert "is no hex digit (digit 1)" in shown.output


@pytest.mark.parametrize(
    "text",
    [
        "01027100",
        "0x01027100",
        "0X01 0x02 0x71 0x00",
        "01:02:71:00",
        "01_02_0x71_00",
        "0x01, 0x02, 0x71, 0x00,",
        "\ufeff0102 · 71 00\r\n",
    ],
)
def test_hex_is_taken_as_people_paste_it(text: str) -> None:
    for shown in (
        runner.invoke(app, ["inspect", "key", text]),
        runner.invoke(app, ["inspect", "key", "-"], input=text),
    ):
        assert shown.exit_code == 0, shown.output
        assert "b'q'" in shown.output


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
        (["hex", "-", "-"], "only one of KEY and VALUE can be -"),
        (["key", "0102710x00"], "'x' is no hex digit (digit 8)"),
        (["value", "Payloads", "00"], "'Payloads' is not one of: ActiveMessages,"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], complaint: str) -> None:
    shown = runner.invoke(app, ["inspect", *arguments])

    assert shown.exit_code == 2
    assert complaint in shown.output


def test_the_version_is_printed() -> None:
    assert runner.invoke(app, ["--version"]).output.startswith("odq 0.")
