"""The structures that C and Python share, compared when the library is loaded."""

import ctypes

import pytest

from tinychat.errors import TinychatError
from tinychat.kernels.cpu import library


def test_the_sources_agree() -> None:
    assert library.Library().chunk > 0


def test_two_fields_that_change_places_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name, _ in library.CMatrix._fields_]
    assert names[1:3] == ["rows", "cols"]

    class Swapped(ctypes.Structure):
        _fields_ = [library.CMatrix._fields_[i] for i in (0, 2, 1, 3, 4)]

    monkeypatch.setattr(library, "CMatrix", Swapped)
    with pytest.raises(TinychatError, match="fields cols, rows of Swapped"):
        library.Library()


@pytest.mark.parametrize("name", ["MAX_GROUP", "MIN_WEIGHT_SUM"])
def test_a_constant_that_differs_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, name, 1 + getattr(library, name))
    with pytest.raises(TinychatError, match=name):
        library.Library()
