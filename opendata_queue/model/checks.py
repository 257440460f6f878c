"""Checks of arguments that several modules make."""

from __future__ import annotations

from opendata_queue.model.errors import InvalidInputError


def check_integer(name: str, value: int, least: int, most: int) -> None:
    """Refuse what is no number in a range; true and false are none, though Python counts them."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidInputError(f"{name} is {value!r}, not an integer within {least} to {most}")
