"""g4 bench on the tiny models."""

from tests.cli.conftest import G4


def test_bundle_and_checkpoint_beside_transformers(g4: G4) -> None:
    sizes = ("--prompt", "24", "--new", "4", "--repeats", "1", "--device", "cpu")
    plain = g4("bench", "tiny-31b", "--against", "transformers", *sizes, "--json").json
    assert plain["transformers"]["decode_tokens_per_second"] > 0
    assert 0 < plain["decode_of_read_bandwidth"] < 5
    bundle = g4("build", "tiny-31b").out.strip()
    packed = g4("bench", bundle, *sizes, "--json").json
    assert packed["operations"] == plain["operations"]
    assert packed["decode_bytes"] < 0.6 * plain["decode_bytes"]
    table = g4("bench", bundle, *sizes).out
    assert "% of the matrix rate" in table
    assert "% of the read bandwidth" in table


def test_sizes_below_their_least(g4: G4) -> None:
    for option in ("--prompt", "--new", "--repeats"):
        ran = g4("bench", "tiny-31b", option, "0")
        assert ran.code == 2
        assert f"{option} is 0" in ran.err
