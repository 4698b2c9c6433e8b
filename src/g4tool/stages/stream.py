"""The quantize stage fed shard by shard from the Hub, for a disk that does not hold the checkpoint.

The bundle is the one that the ordinary road makes, with the same identity: that is told by the
repository's commit and the recipe, however the bytes came.
"""

from dataclasses import dataclass
from typing import ClassVar

from g4tool.errors import UsageError
from g4tool.pipeline.work import Work
from g4tool.stages.checkpoints import DownloadStage
from g4tool.stages.convert import ConvertStage
from g4tool.stages.quantize import QuantizeStage

SOURCE = "source"


@dataclass(frozen=True)
class StreamedQuantizeStage(QuantizeStage):
    """Quantizes what `convert` would give of a Hub model, without either being made."""

    fetches: ClassVar[bool] = True

    @property
    def download(self) -> DownloadStage:
        """Which repository and commit."""
        assert isinstance(self.convert, ConvertStage)
        assert isinstance(self.convert.source, DownloadStage)
        return self.convert.source

    def files_at_once(self) -> int:
        """One: several would want several shards."""
        return 1

    def run(self, work: Work) -> None:
        """Fetch a shard when the first of its layers is due; check it as `convert` would."""
        from g4tool.checkpoint.folder import open_files, read_config
        from g4tool.checkpoint.lazy import Checkpoint, check_values
        from g4tool.checkpoint.tensorfile import SafetensorsFile
        from g4tool.hub.shards import Shards

        kept: set[str] = set()

        def check(file: SafetensorsFile) -> None:
            for key in kept & file.tensors.keys():
                check_values(file, key)

        # Beside the artifact's own files, where it goes away with what is unfinished.
        folder = work.path.parent / SOURCE
        shards = Shards(self.download.repo, self.download.commit, folder, check, work.report)
        try:
            # Index and shards must agree; nothing but headers is read for that.
            opened = open_files(shards.headers)
            for file in opened.values():
                file.close()
            files = {name: shards.file(name) for name in opened}
            checkpoint = Checkpoint(shards.headers, read_config(shards.headers), files)
            kept |= {
                key
                for name in (*checkpoint.names, *checkpoint.extras)
                for _, key in checkpoint.pieces(name)
            }
            origin = {"stage": self.download.name, **self.download.parameters()}
            # Sorted, as it comes out of a manifest.
            self.write(work, checkpoint, dict(sorted(origin.items())))
            checkpoint.close()
        finally:
            shards.close()


def streamed(stage: QuantizeStage) -> StreamedQuantizeStage:
    """The same stage, fed from the Hub. Raises UsageError where there is nothing to stream."""
    convert = stage.convert
    if not isinstance(convert, ConvertStage) or not isinstance(convert.source, DownloadStage):
        raise UsageError("--stream-source is for a model on the Hub; this one is on this machine.")
    if convert.materialize:
        raise UsageError("--stream-source goes without convert.materialize, which copies it all.")
    return StreamedQuantizeStage(
        convert, stage.options, stage.qat, stage.device, formats=stage.formats
    )
