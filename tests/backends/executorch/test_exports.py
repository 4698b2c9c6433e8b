"""Exported programs of the three tiny models beside the eager int4 model they were made from."""

import math
import random
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from g4tool.backends.executorch.runtime import ExportedModel, XnnpackMethods, open_export
from g4tool.generate.loop import Session, generate
from g4tool.generate.tokenizer import Tokenizer
from g4tool.pipeline.artifact import Source
from g4tool.stages.verify import prove
from tests.backends.executorch.conftest import MODELS, WINDOW, Exports
from tests.runner.conftest import runner  # noqa: F401  (a fixture)

pytestmark = pytest.mark.parametrize("model", MODELS)
CHUNKS = (2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1)
NEW = 24


def prompt(vocab: int) -> list[int]:
    random.seed(0)
    return [2, *(random.randrange(300, vocab) for _ in range(4 * WINDOW - 1))]


def feed(model: ExportedModel, ids: list[int], chunk: int) -> Tensor:
    """Logits after each chunk, [calls, vocab]; a last chunk of one is decoded."""
    found = []
    for at in range(0, len(ids), chunk):
        part = torch.tensor([ids[at : at + chunk]])
        method = model.methods.decode if part.shape[1] == 1 else model.methods.prefill
        found.append(method(part, torch.tensor(at))[0])
    return torch.stack(found)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_logits_of_any_chunk_are_the_eager_models(exports: Exports, model: str, chunk: int) -> None:
    made = exports(model)
    ids = prompt(made.facts.vocab_size)
    program = open_export(made.folder)
    found = feed(program, ids, chunk)
    ends = [min(at + chunk, len(ids)) - 1 for at in range(0, len(ids), chunk)]
    with torch.no_grad():
        expected = made.eager(torch.tensor([ids]))[0]
    assert (found - expected[ends]).abs().max() <= 1e-4

    # Decoding goes on where the prompt ended, over the same cache.
    greedy, logits = [], found[-1]
    for position in range(len(ids), len(ids) + NEW):
        greedy.append(int(logits.argmax()))
        logits = program.methods.decode(torch.tensor([greedy[-1:]]), torch.tensor(position))[0]
    (eager,) = zip(*generate(made.eager, [ids], max_new_tokens=NEW), strict=True)
    assert greedy == list(eager)


def test_both_methods_share_one_cache(exports: Exports, model: str) -> None:
    made = exports(model)
    ids = prompt(made.facts.vocab_size)
    with torch.no_grad():
        expected = made.eager(torch.tensor([ids]))[0, -1]
    last = (torch.tensor([ids[-1:]]), torch.tensor(len(ids) - 1))
    path = made.folder / "model.pte"
    one, other = XnnpackMethods(path), XnnpackMethods(path)
    for at in range(0, len(ids) - 1, WINDOW):
        one.prefill(torch.tensor([ids[at : at + WINDOW][: len(ids) - 1 - at]]), torch.tensor(at))
    assert (one.decode(*last)[0] - expected).abs().max() <= 1e-4
    # A program of its own has nothing in its cache: what the sharing is worth.
    assert (other.decode(*last)[0] - expected).abs().max() > 0.1


def test_it_generates_as_the_eager_model_does_turn_after_turn(exports: Exports, model: str) -> None:
    made = exports(model)
    ids = prompt(made.facts.vocab_size)
    sessions = [Session(each, 256) for each in (made.eager, open_export(made.folder))]
    for turn in (ids[:50], ids[:3], ids):
        eager, exported = (
            list(session.generate([turn], max_new_tokens=12)) for session in sessions
        )
        assert exported == eager


def test_the_proof_is_written_down(exports: Exports, model: str) -> None:
    made = exports(model)
    assert made.facts.verified is not None
    stages = {found["stage"]: found for found in made.facts.verified}
    assert list(stages) == [
        "eager",
        "exported program",
        "lowered",
        "model.pte read back",
        "weights in the file",
    ]
    assert all(found["passed"] for found in stages.values())
    # int4 differs from bf16 by far more than rounding, or something else was compared.
    assert stages["eager"]["difference"] > 0.05
    assert 0 < stages["model.pte read back"]["difference"] <= 1e-4


def test_weights_are_in_the_file_as_int4_only(exports: Exports, model: str) -> None:
    made = exports(model)
    packed = sum(
        part.nbytes
        for part in made.eager.state_dict().values()
        if part.dtype in (torch.uint8, torch.int8)
    )
    whole = (made.folder / "model.pte").stat().st_size
    # Scales, norms and routers in fp32 and the program itself beside the packed codes.
    assert packed < whole < 1.35 * packed + 600_000


def test_what_is_delegated(exports: Exports, model: str) -> None:
    facts = exports(model).facts
    assert facts.delegates.keys() == {"prefill", "decode"}
    for calls in facts.delegates.values():
        assert calls["XnnpackBackend"] >= 10
        # What XNNPACK computes in another way than torch stays outside of it.
        assert {"aten::gelu.out", "aten::_softmax.out", "aten::rsqrt.out"} <= calls.keys()


def test_it_can_be_proved_again(exports: Exports, model: str) -> None:
    made = exports(model)
    assert not isinstance(made.stage.weights, Source)
    findings = prove(made.folder, made.store.ensure(made.stage.weights).path)
    assert [found.stage for found in findings] == ["files", "model.pte", "weights in the file"]
    assert all(found.passed for found in findings)


def test_the_cpp_runner_gives_the_same(
    exports: Exports,
    model: str,
    runner: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    made = exports(model)
    text = "The ships came home to the harbour, and the old men who had waited there so long said "
    arguments = ["--max-new-tokens", str(NEW), "--ids", "ids", "--logits", "logits"]
    done = subprocess.run(
        [runner, made.folder, text * 8, "--raw", *arguments, "--prefill-chunk", str(WINDOW + 1)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "GPU peak memory usage: 0 MiB" in done.stderr.splitlines()

    tokenizer = Tokenizer(made.folder)
    ids = tokenizer.encode(text * 8, bos=True)
    assert len(ids) > 4 * WINDOW
    new = [int(line) for line in (tmp_path / "ids").read_text().split()]
    with torch.no_grad():
        eager = made.eager(torch.tensor([ids + new[:-1]]))[0, len(ids) - 1 :]
    logits = torch.frombuffer(bytearray((tmp_path / "logits").read_bytes()), dtype=torch.float32)
    assert (logits.view(len(new), -1) - eager).abs().max() <= 1e-4
    assert new == eager.argmax(-1).tolist()
    ends = set(made.facts.eos_ids)
    shown = [each for each in new if each not in ends]
    assert done.stdout.removesuffix("\n") == tokenizer.decode(shown, skip_special=True)
    assert len(new) == NEW or new[-1] in ends


def test_the_runner_says_what_is_wrong(
    exports: Exports,
    model: str,
    runner: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    folder = exports(model).folder
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    damaged = (folder / "model.pte").read_bytes()[:5000]
    cases = [
        ([folder, "word " * 400, "--raw"], 1, "shorten it"),
        ([folder, "hello", "--cuda-graph"], 2, "does not run on CUDA"),
        ([tmp_path, "hello"], 1, "has no model.pte"),
    ]
    for arguments, code, says in cases:
        done = subprocess.run([runner, *arguments], capture_output=True, text=True)
        assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    (tmp_path / "model.pte").write_bytes(damaged)
    done = subprocess.run([runner, tmp_path, "hello"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "export the model again" in done.stderr


def test_perplexity_of_a_program_is_the_eager_models(exports: Exports, model: str) -> None:
    from g4tool.evaluate.corpus import cut, shipped_texts
    from g4tool.evaluate.evaluation import evaluate_beside
    from g4tool.evaluate.scores import observe

    made = exports(model)
    windows = cut(shipped_texts()[:1], Tokenizer(made.folder), 100, 200)
    found = evaluate_beside(
        observe(made.eager, windows), open_export(made.folder), "program", "eager"
    )
    assert found.beside is not None
    assert abs(found.beside.fidelity.kl_mean) < 1e-6
    assert found.beside.fidelity.top1 == 1
    assert math.isclose(
        found.prediction.perplexity, found.beside.reference.perplexity, rel_tol=1e-5
    )
    assert "shows no layers" in found.notes[0]
