"""300 malformed requests of scripts/fuzz_server.py; by hand it runs 10,000."""

from scripts.fuzz_server import fuzz, main


def test_malformed_requests(url: str) -> None:
    statuses, wrong = fuzz(url, 300, seed=1)
    assert not wrong, "\n".join(wrong)
    assert statuses[200] and statuses[400] > 100  # what is nearly good is answered


def test_a_finding_is_the_exit_status(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["fuzz_server", "http://127.0.0.1:9", "-n", "3"])  # nobody is there
    assert main() == 1 and "no server" in capsys.readouterr().out
