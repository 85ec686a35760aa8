import gguf

from tinychat.kernels.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType


def test_they_are_those_of_the_gguf_package() -> None:
    """Of whatever version: another one may know a type more or less."""
    ours = {t.name: (t.value, GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    theirs = {t.name: (t.value, gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    both = ours.keys() & theirs.keys()
    assert len(both) > 30
    assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}
