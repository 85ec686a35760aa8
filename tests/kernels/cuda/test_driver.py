import pytest

from tinychat.errors import TinychatError
from tinychat.kernels.cuda import driver
from tinychat.kernels.cuda.device import GPU


def test_a_driver_that_is_too_old_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a driver all the same: who asks for no device is told why the GPU is not used."""
    monkeypatch.setattr(driver, "library", driver.library.__wrapped__)
    monkeypatch.setattr(driver, "LIBRARY", None)  # this process, which has none of the functions
    assert driver.exists.__wrapped__()
    with pytest.raises(TinychatError, match=r"CUDA does not work here: .*cuInit"):
        GPU()
    monkeypatch.setattr(driver, "LIBRARY", "libnosuch.so")
    assert not driver.exists.__wrapped__()
