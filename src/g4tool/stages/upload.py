"""From artifacts to a repository: lays it out, writes its card, and reads it as others will."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4tool.errors import G4Error, UsageError
from g4tool.pipeline.artifact import Artifact
from g4tool.progress import Progress, Report, silent
from g4tool.recipe.model import Recipe

if TYPE_CHECKING:
    from g4tool.hub.assemble import LocalFile
    from g4tool.hub.card import Folder

PROGRAMS = ("export-cpu", "export-cuda", "compile-neuron")
LAYOUTS = ("torchao", "executorch", "compressed-tensors")
_PROMPT = "The sea is"
_NEW_TOKENS = 16
# Beyond the weights: activations, and what the interpreter and torch take.
_ROOM = 1 << 30
_TOWERS = ("vision", "audio", "embed_vision", "embed_audio")


@dataclass(frozen=True)
class Publication:
    """A repository laid out in `folder`, not yet checked. `original`: the bundle it was made of."""

    repo: str
    folder: Path
    original: Path
    files: "list[LocalFile]"
    card: str
    notes: list[str]


def layouts(bundle: Artifact) -> dict[str, dict[str, tuple[Path, int, str]]]:
    """The bundle's files by layout, the one at its root first, under names as their loaders know.

    Name -> place, size in bytes, SHA-256.
    """
    found: dict[str, dict[str, tuple[Path, int, str]]] = {_layout_of(bundle.path): {}}
    root = next(iter(found))
    for name, record in bundle.files.items():
        folder, _, rest = name.partition("/")
        inside = rest and folder in LAYOUTS
        files = found.setdefault(folder, {}) if inside else found[root]
        files[rest if inside else name] = (bundle.locate(name), record.size, record.sha256)
    return found


def lay_out(
    recipe: Recipe,
    bundle: Artifact,
    others: Mapping[str, Artifact],
    extra: Iterable[str],
    folder: Path,
    evaluation: Mapping[str, Any] | None = None,
) -> Publication:
    """Link what is to be published into the empty `folder` and write the card.

    `others`: folder name -> program. `extra`: further layouts of the bundle, each in a folder.
    Raises UsageError for a layout that the bundle does not have.
    """
    from g4tool.hub.assemble import Part, assemble
    from g4tool.hub.card import CARD, Folder, base_metadata

    assert recipe.upload is not None, "the section is there"
    held = layouts(bundle)
    first = next(iter(held))
    root: str = recipe.upload.layout or first
    for name in (root, *extra):
        if name not in held:
            raise UsageError(
                f"the bundle has no layout {name}, only {', '.join(held)}: add it to the recipe's"
                f" quantize.formats."
            )
    parts = [Part("", held[root])]
    parts += [Part(name, held[name]) for name in extra if name != root]
    parts += [Part(name, _files(artifact)) for name, artifact in others.items()]
    folders = [
        Folder(part.folder, kind, sum(size for _, size, _ in part.files.values()), note)
        for part in parts[1:]
        for kind, note in [_kind(part.folder, bundle, others)]
    ]
    original = bundle.path if root == first else bundle.path / root
    metadata = base_metadata(original / CARD)
    text, notes = _card(recipe, original, held[root], metadata, folders, evaluation)
    return Publication(
        recipe.upload.repo, folder, original, assemble(parts, text, folder), text, notes
    )


def reread(publication: Publication, report: Report = silent) -> list[str]:
    """Load the laid out repository with the loader that its users take, and let it speak.

    Its text must be that of the bundle it was made of, whose files `hub.assemble.check_files` has
    compared byte by byte. Returns what could not be done here. Raises G4Error.
    """
    from g4tool.checkpoint.folder import weight_files

    size = sum(path.stat().st_size for path in weight_files(publication.folder))
    room = _free_memory()
    if room is not None and room < size + _ROOM:
        return [
            f"its text was not compared: that takes {(size + _ROOM) / 1e9:.1f} GB of memory, and"
            f" {room / 1e9:.1f} GB are free; its files were."
        ]
    report(Progress("re-read", 0, 2, "models", "as published"))
    published = _speak(publication.folder)
    report(Progress("re-read", 1, 2, "models", "as made"))
    made = _speak(publication.original)
    report(Progress("re-read", 2, 2, "models"))
    if published != made:
        raise G4Error(
            f"{publication.repo} as it would be published says {published!r} where the bundle says"
            f" {made!r}: nothing was sent; please report this."
        )
    return []


def _speak(folder: Path) -> str:
    import torch

    from g4tool.generate.loop import generate
    from g4tool.generate.tokenizer import Tokenizer
    from g4tool.stages.loading import load_folder

    model, files = load_folder(folder, torch.bfloat16, "cpu")
    tokenizer = Tokenizer(files)
    steps = generate(model, [tokenizer.encode(_PROMPT, bos=True)], max_new_tokens=_NEW_TOKENS)
    return tokenizer.decode([step[0] for step in steps if step[0] is not None])


def _card(
    recipe: Recipe,
    bundle: Path,
    files: Mapping[str, tuple[Path, int, str]],
    metadata: Mapping[str, Any],
    folders: "list[Folder]",
    evaluation: Mapping[str, Any] | None,
) -> tuple[str, list[str]]:
    """The card, and what a person should know about it."""
    from g4tool.checkpoint.folder import read_json
    from g4tool.formats.bundle import BUNDLE
    from g4tool.hub.card import CardFacts, card
    from g4tool.quantize.account import from_json

    assert recipe.upload is not None, "the section is there"
    lineage = read_json(bundle / BUNDLE)
    source = lineage["source"]
    given = recipe.upload.base_model
    base = given or source.get("repo")
    accounts = from_json(lineage["tensors"])
    notes = []
    if base is None:
        notes.append(
            "The card names no base model, for the source is a folder: say which repository it is"
            " from with --set upload.base_model=OWNER/NAME."
        )
    if "license" not in metadata:
        notes.append("The card states no licence, for the base's own card states none.")
    text = card(
        CardFacts(
            repo=recipe.upload.repo,
            layout="torchao" if _layout_of(bundle) == "torchao" else "compressed-tensors",
            base=base,
            commit=source.get("commit") if given in (None, source.get("repo")) else None,
            metadata=metadata,
            lineage=lineage,
            accounts=accounts,
            nbytes=sum(size for _, size, _ in files.values()),
            experts=any(".experts." in a.name and a.scheme != "keep" for a in accounts),
            folders=folders,
            evaluation=evaluation,
            towers=any(account.name.startswith(_TOWERS) for account in accounts),
        )
    )
    return text, notes


def _layout_of(folder: Path) -> str:
    from g4tool.checkpoint.folder import CONFIG, read_json

    table = read_json(folder / CONFIG).get("quantization_config")
    method = table.get("quant_method") if isinstance(table, dict) else None
    return "compressed-tensors" if method == "compressed-tensors" else "torchao"


def _files(artifact: Artifact) -> dict[str, tuple[Path, int, str]]:
    return {n: (artifact.locate(n), r.size, r.sha256) for n, r in artifact.files.items()}


def _kind(name: str, bundle: Artifact, others: Mapping[str, Artifact]) -> tuple[Any, str]:
    """What the card says a folder is: its kind, and a remark."""
    if name not in others:
        below = bundle.manifest["facts"]["formats"][name].get("zeros_below_0")
        return name, (
            f" ({below:,} groups have zero points below 0, which its packing for CUDA takes for 0)"
            if below
            else ""
        )
    artifact = others[name]
    if artifact.stage == "compile-neuron":
        compiled = artifact.manifest["facts"].get("compiled")
        return "compile-neuron", "" if compiled else " (plan and shards; `compile.sh` compiles)"
    from g4tool.backends.executorch.folder import read_facts

    facts = read_facts(artifact.path)
    gpu = f", compiled for {facts.gpu['name']}" if facts.gpu else ""
    unproved = "" if facts.verified else ", exported without a proof"
    kind = "export-cuda" if facts.backend == "cuda" else "export-cpu"
    return kind, f", up to {facts.max_seq_len} tokens{gpu}{unproved}"


def _free_memory() -> int | None:
    """Bytes that a process may take now; None where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
