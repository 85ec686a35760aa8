"""The long session of scripts/soak.py in short: nothing piles up."""

import json
import subprocess
import sys

# In a process of its own: what other tests imported, and the threads they left, are not this session's.
SESSION = """
import asyncio, dataclasses, json, pathlib, sys
from scripts.soak import soak

async def samples():
    return [sample async for sample in soak(24, 12, pathlib.Path(sys.argv[1]))]

print(json.dumps([dataclasses.asdict(s) for s in asyncio.run(samples())]))
"""


def test_a_session_does_not_grow(tmp_path):
    done = subprocess.run([sys.executable, "-c", SESSION, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, last = json.loads(done.stdout.splitlines()[-1])
    assert last["widgets"] <= 250 and last["alive"] <= last["widgets"] + 60, "widgets of turns that are gone"
    assert last["tasks"] <= last["widgets"] + 40 and last["threads"] <= first["threads"] + 1
    assert last["objects"] < 1_000_000
