"""Random JSON schemas under which every value is short, so that a model with random weights gets to its end."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["a", "id", "name", "größe", "two words", 'quo"te', "x-y", "list", "$value", "0"]


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Any of the kinds that tools and response formats use; nested at most twice."""
    kind = rng.choice(["string", "integer", "boolean", "null", "enum", "const", "number", "pattern", "format", "union"])
    if depth < 2 and rng.random() < 0.6:
        kind = rng.choice(["object", "object", "array", "anyOf", "ref", "tuple"])
    match kind:
        case "string":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)}
        case "number":
            return {"enum": [0.5, -2, 1e-3, 7]}
        case "enum":
            return {"enum": rng.sample(["one", "zwei", 3, None, True, {"k": [1]}, 'quo"te\n'], 3)}
        case "const":
            return {"const": rng.choice(["x", 1, None, [1, "é"], {"a": {}}])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(yes|no)$", r"^\d{4}-\d{2}$"])}
        case "format":
            return {"type": "string", "format": rng.choice(["ipv4", "uuid"])}
        case "union":
            return {"type": ["boolean", "null"]}
        case "array":
            low = rng.randrange(2)
            items = schema(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(3)}
        case "tuple":
            prefix = [schema(rng, depth + 1) for _ in range(2)]
            return {"type": "array", "prefixItems": prefix, "items": False, "minItems": 2}
        case "anyOf":
            return {"anyOf": [schema(rng, depth + 1) for _ in range(2)]}
        case "ref":
            return {"$ref": "#/$defs/shared"}
    keys = rng.sample(NAMES, rng.randrange(1, 4))
    properties = {key: schema(rng, depth + 1) for key in keys}
    required = [key for key in keys if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def whole(rng: random.Random) -> dict[str, Any]:
    """A schema with what its references point to."""
    return schema(rng) | {"$defs": {"shared": {"type": "string", "maxLength": 4}}}
