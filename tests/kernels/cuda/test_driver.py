from typing import Any

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


class Driver:
    """Functions of a driver that sees some GPUs: (name, capability, memory clock in kHz, width of its bus in bits)."""

    def __init__(self, *seen: tuple[str, tuple[int, int], int, int]) -> None:
        self.seen, self.contexts = seen, list[int]()

    def cuInit(self, flags: int) -> int:
        return 0 if self.seen else 100

    def cuGetErrorString(self, status: int, text: Any) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.seen)
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 10 + number
        return 0

    def cuDeviceGetName(self, text: Any, size: int, device: int) -> int:
        text.value = self.seen[device - 10][0].encode()
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, device: int) -> int:
        _, (major, minor), clock, bus = self.seen[device - 10]
        value._obj.value = {36: clock, 37: bus, 75: major, 76: minor}[which]
        return 0

    def cuDevicePrimaryCtxRetain(self, made: Any, device: int) -> int:
        self.contexts.append(device)
        made._obj.value = device << 8
        return 0


T4, L4, A100 = ("T4", (7, 5), 5001000, 256), ("L4", (8, 9), 6251000, 192), ("A100", (8, 0), 1215000, 5120)
V100 = "V100", (7, 0), 877000, 4096  # faster memory than an L4's, but none of the kernels run on it


def test_the_fastest_gpu_that_can_run_the_kernels_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_gpus", driver._gpus.__wrapped__)
    monkeypatch.setattr(driver, "_context", driver._context.__wrapped__)
    found = Driver(T4, L4, A100, V100)
    monkeypatch.setattr(driver, "library", lambda: found)
    assert [(g.number, g.name, round(g.bandwidth)) for g in driver.gpus()] == [
        (2, "A100", 1555),
        (1, "L4", 300),
        (3, "V100", 898),
        (0, "T4", 320),
    ]
    assert GPU().name == "A100" and GPU(1).name == "L4" and found.contexts == [12, 11]
    with pytest.raises(TinychatError, match=r"capability 8\.0 or newer, this GPU has 7\.5"):
        GPU(0)
    with pytest.raises(TinychatError, match=r"no GPU 4; there are cuda:0 \(T4\), cuda:1 \(L4\), cuda:2 \(A100\), cuda"):
        GPU(4)
    same = Driver(A100, A100)
    monkeypatch.setattr(driver, "library", lambda: same)
    assert [g.number for g in driver.gpus()] == [0, 1]  # of the same kind the driver's order
    none = Driver()
    monkeypatch.setattr(driver, "library", lambda: none)
    with pytest.raises(TinychatError, match="CUDA does not work here: CUDA error 100"):
        GPU()
