import gguf

from tinychat.kernels.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType


def test_they_are_those_of_the_gguf_package() -> None:
    assert {t.name: t.value for t in GGMLQuantizationType} == {t.name: t.value for t in gguf.GGMLQuantizationType}
    assert GGML_QUANT_SIZES == gguf.GGML_QUANT_SIZES
