"""The model card: README.md with the Hub's metadata, how to run it, sizes, errors and lineage.

Everything in it is a function of the bundle, its base's card and what is published beside it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import Environment, StrictUndefined

from g4tool.errors import G4Error
from g4tool.quantize.account import AccountRow, SchemeTotal, TensorAccount, rows, totals

CARD = "README.md"
_LICENCE = ("license", "license_name", "license_link")
_COPIED = (*_LICENCE, "language")

Layout = Literal["torchao", "compressed-tensors"]

_LOADERS = {
    "torchao": "g4; not transformers, vLLM, SGLang",
    "compressed-tensors": "vLLM, SGLang, transformers, g4",
    "executorch": "ExecuTorch's Gemma 4 example, g4",
    "export-cpu": "ExecuTorch, g4",
    "export-cuda": "ExecuTorch, g4",
    "compile-neuron": "NxD Inference",
}


@dataclass(frozen=True)
class Folder:
    """Something published beside the bundle: a folder of the repository."""

    name: str
    kind: Literal[
        "export-cpu", "export-cuda", "compile-neuron", "executorch", "torchao", "compressed-tensors"
    ]
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class CardFacts:
    """What the card says.

    `base`: repository and commit of the checkpoint, None where it came from no repository.
    `metadata` is the front matter of the base's own card, `lineage` the bundle's g4.json,
    `evaluation` the JSON of `g4 eval`. `experts`: whether it has quantized ones. Sizes in bytes.
    """

    repo: str
    layout: Layout
    base: str | None
    commit: str | None
    metadata: Mapping[str, Any]
    lineage: Mapping[str, Any]
    accounts: Sequence[TensorAccount]
    nbytes: int
    experts: bool
    folders: Sequence[Folder] = ()
    evaluation: Mapping[str, Any] | None = None
    towers: bool = False


def card(facts: CardFacts) -> str:
    """README.md."""
    plain = sum(a.weights for a in facts.accounts) * 2
    text: str = _template().render(
        facts=facts,
        front=yaml.safe_dump(_front(facts), sort_keys=False, allow_unicode=True).strip(),
        title=facts.repo.partition("/")[2],
        scheme=_scheme(facts),
        group=_group(facts),
        bits=f"{facts.lineage['bits_per_weight']:.2f}",
        size=_size(facts.nbytes),
        plain=_size(plain),
        tensors=[_row(row) for row in rows(facts.accounts)],
        schemes=[_total(name, total) for name, total in totals(facts.accounts).items()],
        folders=[(folder, _size(folder.nbytes)) for folder in facts.folders],
        layouts=[
            _layout("the root", facts.layout, facts.nbytes, facts.experts),
            *(_layout(f"`{f.name}/`", f.kind, f.nbytes, facts.experts) for f in facts.folders),
        ],
        figures=_figures(facts.evaluation),
        licence=facts.metadata.get("license"),
        terms=facts.metadata.get("license_link"),
        versions=", ".join(f"{k} {v}" for k, v in sorted(facts.lineage["versions"].items())),
    )
    return text


def base_metadata(card: Path) -> dict[str, Any]:
    """The front matter of a card, {} where there is none. Raises G4Error where it is no YAML."""
    if not card.is_file():
        return {}
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return {}
    text = "\n".join(lines[1 : lines.index("---", 1)])
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise G4Error(
            f"{card}: its front matter is no YAML, so the licence it states cannot be copied."
        ) from error
    return found if isinstance(found, dict) else {}


def _front(facts: CardFacts) -> dict[str, Any]:
    front: dict[str, Any] = {}
    if facts.base:
        front |= {"base_model": facts.base, "base_model_relation": "quantized"}
    front |= {key: facts.metadata[key] for key in _COPIED if key in facts.metadata}
    ours = facts.layout == "torchao"
    front["library_name"] = "g4" if ours else "transformers"
    front["pipeline_tag"] = "text-generation"
    scheme = _scheme(facts)
    tags = ["gemma4", "g4", facts.layout]
    if scheme.startswith("int4"):
        tags += ["int4", "4-bit", *(["hqq"] if scheme == "int4-hqq" else [])]
    elif scheme == "int8":
        tags += ["int8", "8-bit"]
    tags += sorted({"executorch" for f in facts.folders if f.kind.startswith("ex")})
    tags += sorted({"neuron" for f in facts.folders if f.kind == "compile-neuron"})
    front["tags"] = tags
    return front


def _scheme(facts: CardFacts) -> str:
    """The scheme of the files at the root: the recipe's, but that all 4 bit is symmetric there."""
    scheme: str = facts.lineage["recipe"]["scheme"]
    packed = facts.layout == "compressed-tensors" and scheme.startswith("int4")
    return "int4-sym" if packed else scheme


def _group(facts: CardFacts) -> str:
    """What follows the scheme: how many weights share a scale. Only 4 bit goes by the recipe's."""
    scheme = _scheme(facts)
    if scheme.startswith("int4"):
        return f", group {facts.lineage['recipe']['group_size']}"
    return ", one scale a row" if scheme == "int8" else ""


def _row(row: AccountRow) -> dict[str, str]:
    kept = row.scheme == "keep"
    return {
        "kind": row.kind,
        "layers": row.layers,
        "scheme": "16 bit" if kept else row.scheme,
        "group": str(row.group_size or ""),
        "size": _size(row.nbytes),
        "mean": "" if kept else f"{100 * row.mean_error:.2f} %",
        "most": "" if kept else f"{100 * row.max_error:.2f} %",
    }


def _total(scheme: str, total: SchemeTotal) -> dict[str, str]:
    return {
        "scheme": "16 bit" if scheme == "keep" else scheme,
        "tensors": str(total.tensors),
        "weights": f"{total.weights / 1e9:.3f} B" if total.weights >= 1e8 else f"{total.weights:,}",
        "size": _size(total.nbytes),
    }


def _layout(where: str, kind: str, nbytes: int, experts: bool) -> dict[str, str]:
    loaders = _LOADERS[kind]
    if kind == "compressed-tensors" and experts:
        loaders = loaders.replace("transformers", "transformers after `import g4tool.hf`")
    return {"where": where, "kind": kind, "size": _size(nbytes), "loaders": loaders}


def _figures(evaluation: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Rows of the quality table from the JSON of `g4 eval`."""
    if evaluation is None:
        return []
    try:
        found = [("perplexity", f"{evaluation['prediction']['perplexity']:.4g}")]
        beside = evaluation.get("beside")
        if beside:
            found += [
                ("perplexity of the base", f"{beside['reference']['perplexity']:.4g}"),
                ("KL(base, this), nats a token", f"{beside['fidelity']['kl_mean']:.4g}"),
                ("same most likely token", f"{100 * beside['fidelity']['top1']:.2f} %"),
            ]
        texts: Iterable[str] = evaluation["texts"]
        found.append(("over", f"{evaluation['tokens']:,} tokens of {', '.join(texts)}"))
    except (KeyError, TypeError, ValueError) as error:
        raise G4Error(
            f"the evaluation is not what `g4 eval --json` prints ({type(error).__name__}: {error})."
        ) from error
    return found


def _size(count: float) -> str:
    unit = "B"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"


@cache
def _template() -> Any:
    source = resources.files("g4tool.hub").joinpath("card.md.jinja").read_text(encoding="utf-8")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(source)
