"""The stage that checks a checkpoint and gives it canonical names, as a view or as new shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from g4tool.pipeline.artifact import Artifact, Source
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.stage import Stage
from g4tool.pipeline.work import Work
from g4tool.stages.checkpoints import checkpoint_folder, copy_file

if TYPE_CHECKING:
    from g4tool.checkpoint.lazy import Checkpoint
    from g4tool.checkpoint.writer import ReadRows, Spec


@dataclass(frozen=True)
class ConvertStage:
    """Checks every tensor's name, shape and values. `dtype`, a torch name, is that of a copy."""

    source: Stage | Source
    materialize: bool = False
    dtype: str | None = None
    name: str = "convert"
    version: int = 2

    @property
    def inputs(self) -> tuple[Stage | Source]:
        """The checkpoint."""
        return (self.source,)

    def parameters(self) -> dict[str, Json]:
        """View or copy, and the dtype of a copy."""
        return {"materialize": self.materialize, "dtype": self.dtype}

    def environment(self) -> dict[str, Json]:
        """Nothing: values are copied or rounded to nearest, the same everywhere."""
        return {}

    def intact(self, artifact: Artifact) -> str | None:
        """Whether the manifest says what the next stages read in it."""
        return missing_fact(
            artifact, {"source": dict, "tensors": int, "bytes": int, "dropped": dict}
        )

    def run(self, work: Work) -> None:
        """Write view.json beside references to the source's files, or a new checkpoint."""
        from g4tool.checkpoint.folder import side_files
        from g4tool.checkpoint.reader import open_checkpoint
        from g4tool.checkpoint.view import VIEW, view_content
        from g4tool.files import write_json

        (given,) = work.inputs
        checkpoint = open_checkpoint(checkpoint_folder(given))
        checkpoint.check_finite(work.report)
        if self.materialize:
            self._materialize(work, checkpoint)
        else:
            work.file(VIEW, lambda path: write_json(path, view_content(checkpoint)))
            for path in checkpoint.files:
                work.refer(path.name, path)
            for name in side_files(checkpoint.folder):
                path = checkpoint.folder / name
                if given.stage != "source" and name in given.files:
                    # Another artifact's own file, which may be pruned before this one.
                    work.file(name, partial(copy_file, path))
                else:
                    work.refer(name, path)
        infos = [checkpoint.info(name) for name in (*checkpoint.names, *checkpoint.extras)]
        work.fact("source", origin(given))
        work.fact("tensors", len(infos))
        work.fact("bytes", sum(info.nbytes for info in infos))
        work.fact("dropped", checkpoint.dropped)

    def _materialize(self, work: Work, checkpoint: "Checkpoint") -> None:
        import torch

        from g4tool.checkpoint import materialize as published
        from g4tool.checkpoint.folder import CONFIG, side_files
        from g4tool.checkpoint.writer import INDEX, SHARD_BYTES, index_content, plan_shards
        from g4tool.files import write_json

        dtype = getattr(torch, self.dtype) if self.dtype else None
        specs, read = published.published_layout(checkpoint, dtype)
        shards = plan_shards(specs, SHARD_BYTES)
        index = index_content(shards)
        small = [name for name in side_files(checkpoint.folder) if name != CONFIG]
        work.expect(len(shards) + len(small) + 1 + (len(shards) > 1))
        work.need(index["metadata"]["total_size"])
        for file, members in shards.items():
            work.file(file, partial(_write_shard, members, read, work))
        config = published.published_config(checkpoint.raw_config, dtype)
        work.file(CONFIG, lambda path: write_json(path, config))
        if len(shards) > 1:
            work.file(INDEX, lambda path: write_json(path, index))
        for name in small:
            work.file(name, partial(copy_file, checkpoint.folder / name))


def _write_shard(members: "dict[str, Spec]", read: "ReadRows", work: Work, path: Path) -> None:
    from g4tool.checkpoint.writer import write_shard

    write_shard(path, members, read, report=work.report)


def missing_fact(artifact: Artifact, facts: Mapping[str, type]) -> str | None:
    """What the manifest lacks of `facts`, name and type; None when nothing."""
    for name, kind in facts.items():
        if not isinstance(artifact.manifest["facts"].get(name), kind):
            return f"its manifest does not say its {name}"
    return None


def origin(artifact: Artifact) -> dict[str, Json]:
    """What the lineage says of a checkpoint: repository and commit, tiny model, or file hashes."""
    if artifact.stage == "source":
        return {"files": artifact.manifest["files"]}
    if artifact.stage == "from-gguf":
        # The file itself; the small ones were made of it.
        return {"files": artifact.manifest["external"]}
    return {"stage": artifact.stage, **artifact.manifest["parameters"]}
