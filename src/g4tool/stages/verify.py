"""The proof of an export that lies in a folder, against the weights it was made from."""

from pathlib import Path
from typing import TYPE_CHECKING

from g4tool.errors import G4Error, UsageError
from g4tool.pipeline import manifest
from g4tool.pipeline.store import Store
from g4tool.progress import Progress, Report, silent

if TYPE_CHECKING:
    from g4tool.backends.executorch.verify import Finding


def weights_of(store: Store, folder: Path) -> Path | None:
    """The bundle in the store with the fingerprint that export.json names, if there is one."""
    from g4tool.backends.executorch.folder import read_facts
    from g4tool.formats.bundle import FINGERPRINT, is_bundle, read_bundle

    wanted = read_facts(folder).source.get("fingerprint")
    for path in sorted((store.home / "artifacts" / "quantize").glob("*")):
        whole = (path / manifest.NAME).is_file() and is_bundle(path)
        if whole and wanted and read_bundle(path).get(FINGERPRINT) == wanted:
            return path
    return None


def prove(folder: Path, weights: Path, report: Report = silent) -> "list[Finding]":
    """Eager beside the program read back, then the weights in its file.

    Raises G4Error for damaged files, for weights of another fingerprint, and for a program that
    samples.
    """
    import torch

    from g4tool.backends.executorch import verify
    from g4tool.backends.executorch.cuda_runtime import CudaMethods
    from g4tool.backends.executorch.folder import PROGRAM, is_export
    from g4tool.backends.executorch.plain import make_plain
    from g4tool.backends.executorch.runtime import open_export
    from g4tool.formats.bundle import FINGERPRINT, lineage_of
    from g4tool.generate.tokenizer import Tokenizer
    from g4tool.model.text import TextModel
    from g4tool.stages.loading import load_folder
    from g4tool.stages.proof import proof_ids, stored_finding, weights_finding

    if not is_export(folder):
        raise UsageError(f"{folder} holds no exported program.")
    exported = open_export(folder, whole=True)
    facts = exported.facts
    if facts.sampling:
        raise UsageError(
            f"{folder} gives tokens, no logits that could be compared: export it without "
            f"--sampling to prove it."
        )
    wanted = facts.source.get("fingerprint")
    found = lineage_of(weights).get(FINGERPRINT)
    if wanted != found:
        raise G4Error(f"{folder} was exported from other weights than those in {weights}.")
    report(Progress("verify", 0, 2, "steps", "eager"))
    dtype = torch.bfloat16 if facts.activations == "bfloat16" else torch.float32
    model, _ = load_folder(weights, dtype, str(exported.device), report)
    assert isinstance(model, TextModel)
    ids = proof_ids(Tokenizer(folder), facts.sliding_window)
    walks = verify.walks(ids, facts.sliding_window, facts.max_seq_len, facts.prefill_chunk)
    eager = verify.eager(model, facts.max_seq_len)
    before = [verify.trace(eager, walk) for walk in walks]
    report(Progress("verify", 1, 2, "steps", "program"))
    run = verify.methods(exported.methods.prefill, exported.methods.decode)
    now = [verify.trace(run, walk) for walk in walks]
    allowed = {
        "float32": verify.EXACT,
        "bfloat16": verify.bf16(model.config),
        "int8": verify.QUANTIZED,
    }
    result = [
        verify.Finding("files", True, note=f"{len(facts.files)} files are as they were written"),
        verify.compare(PROGRAM, before, now, allowed[facts.activations]),
    ]
    if isinstance(exported.methods, CudaMethods):
        result.append(stored_finding(exported.methods, model))
    elif facts.activations == "float32":
        make_plain(model)
        result.append(weights_finding(folder / PROGRAM, model))
    return result
