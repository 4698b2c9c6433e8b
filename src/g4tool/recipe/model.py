"""What a recipe can say. A section that is there, even empty, asks for its stage."""

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.functional_serializers import SerializerFunctionWrapHandler

Scheme = Literal["int4-hqq", "int4-rtn", "int4-sym", "int8", "keep"]
Head = Literal["tied", "int4-hqq", "int4-rtn", "int4-sym", "int8", "keep"]
Solver = Literal["hqq", "rtn", "reference"]
Dtype = Literal["bfloat16", "float16", "float32"]
Format = Literal["torchao", "executorch", "compressed-tensors"]
Positive = Annotated[int, Field(gt=0)]
_CHUNK = 1024


class Section(BaseModel):
    """Base of every part of a recipe: no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=False)


class Rule(Section):
    """Which scheme the tensors get whose canonical name `match` (a regex) is found in.

    `group_size` counts input columns. Without one, a 4-bit scheme takes the recipe's and `int8` has
    one group a row.
    """

    match: str = Field(min_length=1)
    scheme: Scheme
    group_size: Literal[32, 64, 128, 256] | None = None
    solver: Solver | None = None

    @field_validator("match")
    @classmethod
    def _compiles(cls, match: str) -> str:
        try:
            re.compile(match)
        except (re.error, OverflowError) as error:
            raise ValueError(f"not a valid regular expression: {error}") from error
        except RecursionError as error:
            raise ValueError("not a valid regular expression: nested too deeply") from error
        return match

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.scheme.startswith("int4") and self.group_size == 256:
            raise ValueError("a 4-bit scheme has groups of 32, 64 or 128, not 256")
        if self.scheme == "keep" and (self.group_size or self.solver):
            raise ValueError("scheme keep takes neither group_size nor solver")
        if self.scheme == "int8" and self.solver:
            raise ValueError("scheme int8 takes no solver")
        return self


class Quantize(Section):
    """How weights become integers. `rules` are tried in order, the first that matches wins.

    `head` is the output projection's scheme: "tied" uses the token embedding as it is stored,
    any other value stores a second copy of it. `device`: where the solver runs. `formats`: the
    layouts to write, all from one reading of the weights; the first is the artifact's own folder,
    each other one a folder in it.
    """

    scheme: Scheme = "int4-hqq"
    group_size: Literal[32, 64, 128] = 32
    solver: Solver | None = None
    layerwise: bool = True
    head: Head = "tied"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    formats: list[Format] = ["torchao"]
    rules: list[Rule] = []

    @field_validator("formats")
    @classmethod
    def _each_once(cls, formats: list[Format]) -> list[Format]:
        if not formats:
            raise ValueError("names no format: leave the key out for torchao")
        if len(set(formats)) != len(formats):
            raise ValueError("a format is named twice")
        if "executorch" in formats and "torchao" not in formats:
            raise ValueError("executorch is a copy of torchao's weights, so name torchao too")
        return formats


class Convert(Section):
    """Canonical names: as an index over the source's files, or as new shards in `dtype`."""

    materialize: bool = False
    dtype: Dtype | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.dtype and not self.materialize:
            raise ValueError("dtype needs materialize: true, an index cannot change the numbers")
        return self


class _Program(Section):
    max_seq_len: Positive = 4096
    prefill_chunk: Positive = _CHUNK
    sampling: bool = False

    @model_validator(mode="before")
    @classmethod
    def _all_at_once(cls, raw: Any) -> Any:
        """A short cache takes a prompt whole, where nobody asked for another chunk."""
        if not isinstance(raw, dict) or "prefill_chunk" in raw:
            return raw
        longest = raw.get("max_seq_len")
        short = type(longest) is int and 0 < longest < _CHUNK
        return {**raw, "prefill_chunk": longest} if short else raw

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.prefill_chunk > self.max_seq_len:
            raise ValueError(
                f"prefill_chunk {self.prefill_chunk} is longer than max_seq_len {self.max_seq_len}"
            )
        return self


class ExportCuda(_Program):
    """The ExecuTorch program for CUDA. Lengths in tokens."""


class ExportCpu(_Program):
    """The ExecuTorch program for XNNPACK. Lengths in tokens."""

    int8_activations: bool = False


class CompileNeuron(Section):
    """The artifacts for Trainium and Inferentia. `tp` in logical cores, `seq_len` in tokens.

    `lnc` is how many physical cores make a logical one; without it, what the chip's runtime takes.
    `serving`: as vLLM's plugin runs it, prompts one at a time and tokens chosen on the device.
    """

    tp: Positive = 4
    batch: Positive = 1
    seq_len: Positive = 2048
    target: Literal["inf2", "trn1", "trn2", "trn3"] = "trn2"
    lnc: Literal[1, 2] | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    serving: bool = False


class Upload(Section):
    """Where on the Hub the results go.

    `artifacts`: what is published beside the bundle, each in a folder of its name. `layout`: which
    of quantize.formats lies at the repository's root, the first unless said otherwise.
    `base_model`: the repository that the model comes from, where `model` is a folder.
    """

    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    private: bool = False
    layout: Literal["torchao", "compressed-tensors"] | None = None
    artifacts: list[Literal["export-cpu", "export-cuda", "compile-neuron"] | Format] = []
    base_model: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None


def _or_defaults(value: Any) -> Any:
    # `export-cpu:` with nothing after it is YAML for null; it is a wish for the defaults.
    return {} if value is None else value


class Recipe(Section):
    """A model and the stages that it goes through.

    `model` is a Hub id, a folder, a GGUF file or a tiny model's name; `revision` the Hub's branch,
    tag or commit.
    """

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][\w.-]*$")
    model: str = Field(min_length=1)
    revision: str = Field(default="main", min_length=1)
    convert: Annotated[Convert, BeforeValidator(_or_defaults)] = Convert()
    quantize: Annotated[Quantize | None, BeforeValidator(_or_defaults)] = None
    export_cuda: Annotated[ExportCuda | None, BeforeValidator(_or_defaults)] = Field(
        default=None, alias="export-cuda"
    )
    export_cpu: Annotated[ExportCpu | None, BeforeValidator(_or_defaults)] = Field(
        default=None, alias="export-cpu"
    )
    compile_neuron: Annotated[CompileNeuron | None, BeforeValidator(_or_defaults)] = Field(
        default=None, alias="compile-neuron"
    )
    upload: Annotated[Upload | None, BeforeValidator(_or_defaults)] = None

    @model_validator(mode="after")
    def _makes_what_it_publishes(self) -> Self:
        if self.upload is None or self.quantize is None:
            return self
        made = self.quantize.formats
        for name in (self.upload.layout, *self.upload.artifacts):
            if name in get_args(Format) and name not in made:
                raise ValueError(
                    f"upload publishes {name}, which quantize.formats does not have: {made}"
                )
        return self

    @model_serializer(mode="wrap")
    def _without_absent_sections(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A null section read back would ask for that stage.
        return {key: value for key, value in handler(self).items() if value is not None}
