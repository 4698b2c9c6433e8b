"""The stages of GGUF files: one that makes a source of such a file, and one that writes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from g4tool.pipeline.artifact import Artifact, Source
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.stage import Stage
from g4tool.pipeline.work import Work
from g4tool.stages.environment import library_version

if TYPE_CHECKING:
    from g4tool.checkpoint.gguf_header import Metadata
    from g4tool.formats.gguf import Entry
    from g4tool.formats.weights import Weights
    from g4tool.stages.build import Build

FILE = "model.gguf"
"""The name of the file that is written."""


@dataclass(frozen=True)
class FromGgufStage:
    """Makes a checkpoint's folder of a GGUF file: a view of it, its config and its tokenizer.

    The values stay where they are and are dequantized when they are read.
    """

    source: Source
    name: str = "from-gguf"
    version: int = 1

    @property
    def inputs(self) -> tuple[Source]:
        """The file."""
        return (self.source,)

    def parameters(self) -> dict[str, Json]:
        """Nothing: the file says it all."""
        return {}

    def environment(self) -> dict[str, Json]:
        """Nothing: only the file's header is looked at."""
        return {}

    def run(self, work: Work) -> None:
        """Write the view and the small files; refer to the GGUF file."""
        from functools import partial

        from g4tool.checkpoint.folder import CONFIG
        from g4tool.checkpoint.gguf import open_gguf
        from g4tool.checkpoint.gguf_header import read_header
        from g4tool.checkpoint.gguf_small_files import small_files
        from g4tool.checkpoint.view import VIEW, view_content
        from g4tool.files import write_json, write_text

        path = self.source.path.absolute()
        checkpoint = open_gguf(path)
        metadata = read_header(path, texts=True).metadata
        texts = small_files(path, metadata, checkpoint.config.vocab_size)
        work.file(CONFIG, lambda target: write_json(target, checkpoint.raw_config))
        for name, content in texts.items():
            work.file(name, partial(write_text, content=content))
        work.file(VIEW, lambda target: write_json(target, view_content(checkpoint)))
        work.refer(path.name, path)


@dataclass(frozen=True)
class GgufStage:
    """Writes a checkpoint or a bundle as one GGUF file for llama.cpp.

    `dtype`, a torch name, is that of the matrices that are not quantized; None keeps their own.
    """

    weights: Stage | Source
    dtype: str | None = None
    name: str = "gguf"
    version: int = 1

    @property
    def inputs(self) -> tuple[Stage | Source]:
        """A checkpoint, a view of one, or a bundle."""
        return (self.weights,)

    def parameters(self) -> dict[str, Json]:
        """The dtype."""
        return {"dtype": self.dtype}

    def environment(self) -> dict[str, Json]:
        """The package that lays out the file."""
        return {"gguf": library_version("gguf")}

    def intact(self, artifact: Artifact) -> str | None:
        """Whether the manifest says what the command shows."""
        from g4tool.stages.convert import missing_fact

        return missing_fact(artifact, {"types": dict, "error": float, "left_out": int})

    def run(self, work: Work) -> None:
        """Write the file; llama.cpp's shortcomings are found before."""
        import torch

        from g4tool.checkpoint.gguf_config import check_expressible
        from g4tool.formats import gguf
        from g4tool.formats.weights import open_weights

        (given,) = work.inputs
        weights = open_weights(given.path)
        try:
            check_expressible(weights.config)
            dtype = getattr(torch, self.dtype) if self.dtype else None
            entries = gguf.plan_entries(weights, dtype)
            metadata = _metadata(weights, entries)
            left_out = len(weights.extras)
            work.expect(1)
            work.need(gguf.file_size(entries))
            work.file(
                FILE,
                lambda path: gguf.write_gguf(path, weights, entries, metadata, work.report),
            )
        finally:
            weights.close()
        work.fact("types", gguf.type_counts(entries))
        work.fact("error", max(entry.error for entry in entries.values()))
        work.fact("left_out", left_out)
        work.fact("bytes", work.files[FILE].size)


def gguf_stage(chosen: "Build", dtype: str | None) -> GgufStage:
    """The GGUF file of a recipe's model: of a bundle as it is, else of the checked checkpoint."""
    from g4tool.formats.bundle import is_bundle

    source = chosen.source
    bundle = isinstance(source, Source) and is_bundle(source.path)
    return GgufStage(source if bundle else chosen.convert, dtype)


def _metadata(weights: "Weights", entries: Mapping[str, "Entry"]) -> "Metadata":
    from g4tool.checkpoint.gguf_config import ARCHITECTURE, config_metadata
    from g4tool.checkpoint.gguf_tokenizer import tokenizer_metadata
    from g4tool.formats.gguf import file_type

    sizes = config_metadata(weights.config)
    return {
        "general.type": "model",
        "general.file_type": file_type(entries),
        "general.quantization_version": 2,
        **{f"{ARCHITECTURE}.{key}": value for key, value in sizes.items()},
        **tokenizer_metadata(weights.folder, weights.config.vocab_size),
    }
