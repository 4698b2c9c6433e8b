"""The command line's manners: help, usage errors, JSON, exit codes, and what it imports."""

import io
import json
import os
import signal
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
        (["run", "tiny-31b", "x", "--temperature", "1e-30"], "temperature is 1e-30"),
        (["run", "tiny-31b", "x", "--seed", str(2**64)], "seed is 18446744073709551616"),
        (["run", "tiny-31b", "\udcff"], "PROMPT is no UTF-8 text at character 0."),
        (
            ["run", "tiny-31b", "x", "--system", "a\udcff"],
            "--system is no UTF-8 text at character 1",
        ),
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
    between = g4("recipe", "--json", "list")
    assert before.json == after.json == between.json
    assert g4("cache", "--json", "list").json["artifacts"] is not None
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


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line for sh in which $G4 is the command, in a process of its own."""
    env = os.environ | {"G4": f"{sys.executable} -m g4tool", "HF_HUB_OFFLINE": "1"} | environment
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=env, timeout=60)


def test_a_full_device_is_one_sentence() -> None:
    for options in ("", "--json"):
        ran = shell(f"$G4 recipe list {options} > /dev/full")
        assert ran.returncode == 1
        assert ran.stderr == (
            "g4: standard output takes no more (No space left on device): redirect it elsewhere.\n"
        )
    # An error object that cannot be written is still told.
    ran = shell("$G4 biuld --json > /dev/full")
    assert ran.returncode == 2
    assert ran.stderr.startswith("g4: No such command 'biuld'.")
    assert len(ran.stderr.splitlines()) == 1


def test_closed_streams(tmp_path: Path) -> None:
    ran = shell("$G4 recipe list --json >&-")
    assert ran.returncode == 1
    assert ran.stderr.startswith("g4: standard output is closed: ")
    assert len(ran.stderr.splitlines()) == 1
    assert shell("$G4 recipe list <&- >&- 2>&-").returncode == 1
    quiet = shell("$G4 cache prune 2>&- --home " + str(tmp_path))
    assert (quiet.returncode, quiet.stdout) == (0, "0 B freed\n")
    ran = shell("$G4 run tiny-31b <&-")
    assert (ran.returncode, ran.stderr) == (
        2,
        "g4: there is no prompt: give one, or pipe one in.\n",
    )


def test_input_that_is_no_text() -> None:
    ran = shell(r"printf 'ab\377' | $G4 run tiny-31b", PYTHONUTF8="1")
    assert ran.returncode == 2
    assert ran.stderr.startswith("g4: standard input is no utf-8 text (invalid start byte, byte 2)")


def test_output_in_an_encoding_that_lacks_a_character(
    g4: G4, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str) -> str:
        written = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
        assert g4(*arguments).code == 0
        return written.getvalue().decode("ascii")

    overrides = ("recipe", "show", "tiny-31b", "--set", "revision=größe\U0001f30a")
    assert r"gr\xf6\xdfe\U0001f30a" in said(*overrides)
    assert json.loads(said(*overrides, "--json"))["revision"] == "größe\U0001f30a"


@pytest.mark.parametrize(
    ("number", "word", "code"),
    [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)],
)
def test_signals_clean_up_and_say_so(
    g4: G4, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, word: str, code: int
) -> None:
    cleaned = []

    def slow() -> None:
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(True)

    monkeypatch.setattr("g4tool.recipe.load.presets", slow)
    before = signal.getsignal(signal.SIGTERM)
    ran = g4("recipe", "list")
    said = f"{word}; what was finished is kept, run the same command to go on."
    assert (ran.code, ran.out, ran.err) == (code, "", f"g4: {said}\n")
    as_json = g4("recipe", "list", "--json")
    assert as_json.code == code
    assert as_json.json == {"error": {"message": said, "exit_code": code}}
    assert len(cleaned) == 2
    assert signal.getsignal(signal.SIGTERM) == before
