"""Schema-constrained answers of tiny models with random weights, the hard case: every one must validate.

    python scripts/constrained.py [-n 2000]

Each answer has a random schema, a random temperature and its own seed. Prints what failed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import jsonschema

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support import schemas, tiny
from tinychat.engine.engine import Engine
from tinychat.engine.grammar import Grammar
from tinychat.kernels.sampling import Sampling

VARIANTS = ("llama", "qwen2", "qwen3moe", "deepseek2_glm", "deepseek2_lite")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2000)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rng, wrong, tokens, started = random.Random(1), 0, 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            path = tiny.write(Path(folder) / f"{variant}.gguf", variant, "Q8_0")
            engine = Engine.load(path, max_context=512, device=options.device)
            for seed in range(options.n // len(VARIANTS)):
                schema = schemas.whole(rng)
                sampling = Sampling(temperature=rng.choice((0.0, 0.7, 2.0)), seed=seed)
                prompt = [rng.randrange(256) for _ in range(8)]
                answer = engine.generate(prompt, sampling, grammar=Grammar.from_schema(schema))
                text = "".join(token.text for token in answer)
                tokens += engine.stats.generated_tokens
                try:
                    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
                except (ValueError, jsonschema.ValidationError) as e:
                    wrong += 1
                    print(
                        f"{variant} seed {seed}, {engine.stop_reason}: {str(e).splitlines()[0]}\n  {schema}\n  {text}"
                    )
            engine.close()
            print(f"{variant}: {wrong} wrong so far", flush=True)
    seconds = time.perf_counter() - started
    print(f"{wrong} of {options.n} answers are not valid; {tokens:,} tokens in {seconds:.0f} s")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
