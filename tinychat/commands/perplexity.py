"""`tinychat perplexity`: measures the perplexity of a model on a text."""

from __future__ import annotations

from datetime import timedelta

from tinychat.commands.loading import CONTEXT, loaded, settings_of_user, text_of
from tinychat.console import Bar, show_json
from tinychat.models.registry import resolve


def perplexity(
    text: str, file: str, *, context: int, chunks: int | None, as_json: bool, device: str | None, threads: int | None
) -> None:
    """Prints the perplexity of a text file, computed as llama.cpp's llama-perplexity does."""
    from tinychat.measure import perplexity

    prose = text_of(file)
    own = settings_of_user()
    model = resolve(text, own.models)
    more = context if context > CONTEXT else None
    with loaded(model, own, more, device=device, threads=threads) as engine, Bar() as bar:
        for now in perplexity.perplexity(engine, prose, context, chunks):
            left = timedelta(seconds=int(now.eta_s))
            bar.stage(
                f"window {now.chunks + 1} of {now.total_chunks} · perplexity {now.ppl:.2f} · {left} left", now.progress
            )
    if as_json:
        figures = {"ppl": now.ppl, "ppl_err": now.ppl_err, "tokens": now.tokens, "chunks": now.chunks}
        return show_json({"model": model.name, **figures})
    windows = f"{now.chunks} windows of {context}"
    print(f"perplexity {now.ppl:.4f} ± {now.ppl_err:.4f} over {now.tokens:,} tokens in {windows}")
