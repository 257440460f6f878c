"""``odq filter``: try a filter before a queue is made with it."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Final

import typer

from opendata_queue.filters import Filter, FilterError, Header, SystemField, SystemFields
from opendata_queue.filters.nodes import field_of, walk
from opendata_queue.model.safe_text import harmless

app = typer.Typer(help="Check filters, and try them on messages.", no_args_is_help=True)

_NO_MATCH: Final = 1
_BAD_FILTER: Final = 2
_RESULTS: Final = {True: "matches", False: "does not match", None: "unknown"}

Expression = Annotated[str, typer.Argument(metavar="EXPR", help="The filter, in quotes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("check")
def check_filter(expression: Expression, as_json: AsJson = False) -> None:
    """Print the canonical text of a filter, the one that is stored.

    Exits with 2 if it is no filter, and says where and why.

    Example: odq filter check "price>=99.990 and region in ('emea','apj')"
    """
    parsed = _parsed(expression, as_json)
    if as_json:
        typer.echo(json.dumps({"filter": parsed.text, "rules": len(parsed.rules)}, indent=2))
    else:
        typer.echo(_shown(parsed))


@app.command("test")
def try_filter(
    expression: Expression,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A header of the message; of several with one name, the last.",
        ),
    ] = None,
    sys: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="A system field: id, created_at, …"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a message would match a filter, and with what priority.

    Exits with 0 if it matches, with 1 if not, and with 2 if the filter or an option is wrong.
    A comparison with a header that is missing, or of a number with text that is none, is
    unknown; a filter that is unknown does not match.

    Example: odq filter test "type = 'order.created' AND price > 10" --header type=order.created
    --header price=12
    """
    parsed = _parsed(expression, as_json)
    headers = dict(_pair(text, "--header") for text in header or ())
    fields = _system_fields(parsed, sys or [])
    result = parsed.evaluate(headers, fields)
    priority = parsed.priority_if_match(headers, fields)
    unread = [] if result is not None else _missing(parsed, headers)
    if as_json:
        answer = {
            "filter": parsed.text,
            "result": result,
            "matches": result is True,
            "priority": priority,
            "missing_headers": unread,
        }
        typer.echo(json.dumps(answer, indent=2))
    else:
        typer.echo(f"filter    {_shown(parsed)}")
        because = f", for want of the headers {', '.join(unread)}" if unread else ""
        typer.echo(f"result    {_RESULTS[result]}{because}")
        if priority is not None:
            typer.echo(f"priority  {priority}")
    if priority is None:
        raise typer.Exit(_NO_MATCH)


def _parsed(expression: str, as_json: bool) -> Filter:
    try:
        return Filter.given(expression)
    except FilterError as error:
        if as_json:
            wrong = {"reason": error.reason, "line": error.line, "column": error.column}
            typer.echo(json.dumps({"error": wrong}, indent=2))
        else:
            typer.echo(harmless(f"Error: {error}", keep="\n"), err=True)
        raise typer.Exit(_BAD_FILTER) from None


def _shown(parsed: Filter) -> str:
    text = parsed.text or "(empty: matches every message)"
    # Into a pipe it goes as it is: what reads it wants to store it.
    return harmless(text) if sys.stdout.isatty() else text


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} has no =; write NAME=VALUE", param_hint=option)
    return name, value


def _system_fields(parsed: Filter, given: list[str]) -> SystemFields:
    """The fields that were given; each one that the filter asks for must be."""
    known = {field.text.removeprefix("sys."): field for field in SystemField}
    values: dict[SystemField, int] = {}
    for text in given:
        name, value = _pair(text, "--sys")
        field = known.get(name.removeprefix("sys."))
        if field is None:
            raise typer.BadParameter(
                f"{name!r} is not one of: {', '.join(known)}", param_hint="--sys"
            )
        try:
            values[field] = int(value)
        except ValueError:
            raise typer.BadParameter(f"{value!r} is no number", param_hint="--sys") from None
    for asked in _fields(parsed):
        if isinstance(asked, SystemField) and asked not in values:
            name = asked.text.removeprefix("sys.")
            raise typer.BadParameter(
                f"the filter asks for {asked.text}: add --sys {name}=…", param_hint="--sys"
            )
    return SystemFields(*(values.get(field, 0) for field in SystemField))


def _missing(parsed: Filter, headers: dict[str, str]) -> list[str]:
    """The headers that the filter compares and the message lacks, in the filter's order."""
    names = [field.name for field in _fields(parsed) if isinstance(field, Header)]
    return [name for name in dict.fromkeys(names) if name not in headers]


def _fields(parsed: Filter) -> list[Header | SystemField]:
    return [
        field
        for rule in parsed.rules
        for condition, _ in walk(rule.condition)
        if (field := field_of(condition)) is not None
    ]
