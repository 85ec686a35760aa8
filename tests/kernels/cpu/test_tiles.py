"""Matrix tiles (AMX) give what vectors give. Their five operations are written in C for machines without them."""

from pathlib import Path

import numpy as np
import pytest

from tests.kernels.cpu.test_executor import IDS, executor
from tests.support import tiny
from tests.support.blocks import MODEL_QUANTS


@pytest.mark.parametrize("quant", MODEL_QUANTS)
def test_tiles_give_the_bits_of_vectors(quant: str, tmp_path: Path) -> None:
    path, ids = tiny.write(tmp_path / "m.gguf", "llama" if quant != "Q4_K_M" else "deepseek2_glm", quant), IDS * 6
    with executor(path) as ex, executor(path, flags=("-march=native", "-DTILES=2")) as tiles:
        assert "tiles" in tiles.device
        for n in (len(ids), 3, 12):  # whole panels and those with empty columns
            np.testing.assert_array_equal(tiles.forward(ids[:n], 0, "all"), ex.forward(ids[:n], 0, "all"))  # type: ignore[arg-type]
