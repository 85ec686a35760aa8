"""300 malformed requests of scripts/fuzz_server.py; by hand it runs 10,000."""

from scripts.fuzz_server import fuzz


def test_malformed_requests(url: str) -> None:
    statuses, wrong = fuzz(url, 300, seed=1)
    assert not wrong, "\n".join(wrong)
    assert statuses[200] and statuses[400] > 100  # what is nearly good is answered
