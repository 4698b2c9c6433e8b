"""The repository as it will be: links to the artifacts' files in one folder, and what is made anew.

A repository holds one bundle at its root, because vLLM, SGLang and the Hub's own pages look nowhere
else; exported programs and other layouts of the same weights are folders in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from g4tool.errors import G4Error, UsageError
from g4tool.files import sha256, write_text
from g4tool.hub.card import CARD
from g4tool.hub.scan import check_file
from g4tool.progress import Progress, Report, silent

ATTRIBUTES = ".gitattributes"
_LARGE = ("*.safetensors", "*.pte", "*.ptd", "*.neff", "*.pt", "tokenizer.json", "tokenizer.model")
_NEVER = (".bin", ".pkl", ".pth", ".ckpt", ".log", ".part")


@dataclass(frozen=True)
class Part:
    """An artifact's files under a folder of the repository ("" is its root).

    `files`: name -> where it lies, its size, and the SHA-256 that it had when it was made.
    """

    folder: str
    files: Mapping[str, tuple[Path, int, str]]


@dataclass(frozen=True)
class LocalFile:
    """One file to publish: its name in the repository, and what it holds."""

    name: str
    path: Path
    size: int
    sha256: str


def assemble(parts: Sequence[Part], card: str, folder: Path) -> list[LocalFile]:
    """Lay out `parts`, the card and .gitattributes in the empty `folder`; the files by name.

    The base's own README.md gives way to the card. Raises UsageError for two files of one name.
    """
    found: dict[str, LocalFile] = {}
    for part in parts:
        for name, (path, size, digest) in sorted(part.files.items()):
            full = f"{part.folder}/{name}" if part.folder else name
            if full == CARD or name.endswith(_NEVER):
                continue
            if full in found:
                raise UsageError(f"two of the artifacts have a file {full}: publish one of them.")
            link = folder / full
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute())
            found[full] = LocalFile(full, link, size, digest)
    for name, text in ((CARD, card), (ATTRIBUTES, attributes())):
        write_text(folder / name, text)
        size = len(text.encode())
        found[name] = LocalFile(name, folder / name, size, sha256(folder / name))
    return [found[name] for name in sorted(found)]


def attributes() -> str:
    """.gitattributes: which files git keeps outside its history."""
    return "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in _LARGE)


def check_files(
    files: Sequence[LocalFile], marks: Mapping[bytes, str], report: Report = silent
) -> None:
    """Read every file: it must be what its maker wrote, and hold nothing of this machine."""
    total = sum(file.size for file in files)
    done = 0
    for file in files:
        report(Progress("check", done, total, "bytes", file.name))
        if file.path.stat().st_size != file.size or sha256(file.path) != file.sha256:
            raise G4Error(
                f"{file.name} is not what was made: {file.path.resolve()} has changed since; run"
                " the same command again to have it made anew."
            )
        check_file(file.name, file.path, marks)
        done += file.size
    report(Progress("check", total, total, "bytes"))
