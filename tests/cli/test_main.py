"""The command line's manners: help, usage errors, JSON, exit codes, and what it imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import G4

COMMANDS = ("build", "download", "convert", "quantize", "run", "recipe", "cache")


def test_help_lists_every_command(g4: G4) -> None:
    ran = g4("--help")
    assert ran.code == 0
    for name in COMMANDS:
        assert f"  {name} " in ran.out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(g4: G4, name: str) -> None:
    ran = g4(name, "--help")
    assert ran.code == 0
    assert ran.out.startswith("Usage: g4 ")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["recipe", "show", "tiny-31b"], ["cache", "list"], ["--version"]]
)
def test_light_commands_never_import_torch(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['g4', '--home', {str(tmp_path)!r}, *{arguments!r}]\n"
        "from g4tool.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'torchao'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["biuld"], "No such command 'biuld'."),
        (["build", "--dryrun"], "No such option: --dryrun"),
        (["quantize", "int5"], "'int5' is not one of"),
        (["build", "tiny-32b"], "no preset is called 'tiny-32b'; did you mean"),
        (["build", "tiny-31b", "--set", "quantize.group=64"], "group_size"),
        (["build", "tiny-31b", "--until", "train"], "the stages are download, convert, quantize"),
        (["run", "tiny-31", "hello"], "Did you mean tiny-31b?"),
        (["run", "tiny-31b", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["run", "tiny-31b", "x", "--max-new-tokens", "0"], "give at least 1"),
        (["run", "tiny-31b", "x", "--dtype", "int8"], "dtype 'int8' is none of bf16"),
        (["run", "tiny-31b", "x", "--device", "tpu"], "give cpu or cuda"),
        (["run", "tiny-31b", "x", "--raw", "--chat"], "leave out --chat"),
        (["cache", "show", "0000"], "no artifact in"),
        (["recipe", "validate", "nowhere.yaml"], "nowhere.yaml does not exist"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_2(g4: G4, arguments: list[str], said: str) -> None:
    ran = g4(*arguments)
    assert ran.code == 2
    assert said in ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err

    as_json = g4("--json", *arguments)
    assert as_json.code == 2
    assert said in as_json.json["error"]["message"]
    assert as_json.json["error"]["exit_code"] == 2


def test_shared_options_stand_before_or_after_the_command(g4: G4) -> None:
    before = g4("--json", "recipe", "list")
    after = g4("recipe", "list", "--json")
    assert before.json == after.json
    assert {"31b-int4-hqq", "tiny-31b"} <= {preset["name"] for preset in before.json["presets"]}


def test_overrides_add_up_over_both_places(g4: G4) -> None:
    ran = g4(
        "--set", "quantize.group_size=64", "recipe", "show", "tiny-31b",
        "--set", "quantize.head=int8", "--json",
    )  # fmt: skip
    assert ran.json["quantize"]["group_size"] == 64
    assert ran.json["quantize"]["head"] == "int8"


def test_unexpected_failures_hide_the_traceback_until_asked(
    g4: G4, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("the moon is in the way")

    monkeypatch.setattr("g4tool.recipe.load.presets", broken)
    ran = g4("recipe", "list")
    assert ran.code == 1
    assert "unexpected RuntimeError: the moon is in the way." in ran.err
    assert "Traceback" not in ran.err
    with pytest.raises(RuntimeError):
        g4("--debug", "recipe", "list")
