"""The long session of scripts/soak.py in short: nothing piles up."""

from scripts.soak import soak


async def test_a_session_does_not_grow(tmp_path):
    first, last = [sample async for sample in soak(40, 20, tmp_path)]
    assert last.widgets <= 250 and last.alive <= last.widgets + 60, "widgets of turns that are gone"
    assert last.tasks <= last.widgets + 40 and last.threads <= first.threads + 1
    assert last.objects - first.objects < 80_000  # of 20 turns; what other tests imported is in both
