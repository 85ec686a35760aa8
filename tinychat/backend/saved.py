"""What local backends keep on the disk beside the models: the KV caches of conversations."""

from __future__ import annotations

from tinychat.engine.kvstore import KVStore


def forget(conversation: str) -> int:
    """Deletes the KV cache of a conversation, token ids included; returns the bytes that freed."""
    return KVStore(0).forget(conversation)


def usage() -> tuple[int, int]:
    """(files, bytes) of all saved KV caches."""
    return KVStore(0).usage()


def clear() -> int:
    """Deletes every saved KV cache; returns the bytes that freed."""
    return KVStore(0).clear()
