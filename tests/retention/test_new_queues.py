"""Queues that are made while the compactor looks for what is finished."""

from __future__ import annotations

import pytest

from odq_compactor import RetentionCompactor, finished, set_delete_when_done
from odq_compactor.plan import NEW_POSITION, Freeable
from opendata_queue import Engine, NewMessage
from tests.conftest import NewRoot
from tests.retention.rows import QUICK


@pytest.mark.parametrize("made_anew", [False, True])
async def test_what_a_new_queue_was_given_of_the_past_stays(
    new_memory_root: NewRoot, monkeypatch: pytest.MonkeyPatch, made_anew: bool
) -> None:
    async with await Engine.open(new_memory_root()) as engine:
        await set_delete_when_done(engine.stores.queues, True)
        await engine.create_queue("first")
        await engine.publish_many([NewMessage(b"%d" % number) for number in range(100)])
        await engine.all_is_routed()
        claimed = await engine.claim("first", 100)
        await engine.ack("first", *(one.receipt for one in claimed))
        name = "first" if made_anew else "second"
        live_ids = finished.live_ids

        async def then_a_queue_is_made(*arguments: object) -> object:
            found = await live_ids(*arguments)  # type: ignore[arg-type]
            if made_anew:
                await engine.delete_queue(name)
            await engine.create_queue(name, start="beginning")
            await engine.parts.replay.finished()
            return found

        monkeypatch.setattr(finished, "live_ids", then_a_queue_is_made)
        report = await RetentionCompactor(engine, QUICK).run_once(thorough=True)

        assert not report.removed
        assert len(await engine.claim(name, 1_000)) == 100


def test_what_can_be_freed_later_is_remembered_by_the_minute() -> None:
    freeable = Freeable(NEW_POSITION)
    for second in range(3_600):
        freeable.add(10, aged_at=1_000 * second + 1)
    position = freeable.into(NEW_POSITION)

    assert len(freeable._aging) == 60
    assert (position.aging_bytes, position.aged_at) == (36_000, 3_600_000)
    assert freeable.at(59_999) == 0
    assert freeable.at(60_000) == 600
    assert freeable.into(NEW_POSITION).aging_bytes == 35_400
    again = Freeable(position)
    assert (again.at(3_599_999), again.at(3_600_000)) == (0, 36_000)
