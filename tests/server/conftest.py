"""One SmolLM2 behind HTTP for all tests of a worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import serving
from tinychat.backend.local import LocalBackend
from tinychat.kernels.sampling import Sampling
from tinychat.server.answer import ServedModel


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[LocalBackend]:
    backend = LocalBackend.open(smollm2_path, max_context=2048, device="cpu")
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def url(smollm2: LocalBackend) -> Iterator[str]:
    """Greedy where a request does not say otherwise."""
    with serving(ServedModel("smollm2:135m", smollm2, smollm2, Sampling(temperature=0.0, seed=1), most=400)) as found:
        yield found
