"""`g4 eval`: what quantization costs, in perplexity, KL and agreement, layer by layer."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4tool.cli.common import Env, command
from g4tool.cli.models import ensure, find_model
from g4tool.cli.output import table
from g4tool.errors import UsageError

if TYPE_CHECKING:
    from g4tool.evaluate.evaluation import Evaluation
    from g4tool.stages.evaluate import Loaded

HELP = """Measure a model on held-out text.

MODEL and REF are checkpoints', views' or bundles' folders, Hub ids or tiny models' names. A bundle
is compared with the checkpoint it was made from where that is at hand.

    g4 eval build/tiny-31b

    g4 eval tiny-31b --sweep --report sweep.html
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "eval", help=HELP)(evaluate)


def evaluate(
    env: Env,
    model: Annotated[str, typer.Argument(help="Hub id, folder, or a tiny model's name.")],
    against: Annotated[
        str | None, typer.Option(metavar="REF", help="The reference [a bundle's own source].")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="UTF-8 text [what ships with g4].")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try every scheme and group size too.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page with plots.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="At most this many tokens, spread over the text.")
    ] = 16384,
    dtype: Annotated[str, typer.Option(help="Of activations: bf16, fp16 or fp32.")] = "fp32",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda [cuda where there is one].")
    ] = None,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit on the Hub.")] = "main",
) -> None:
    """Load the models, measure, print a table, write the page."""
    if report and not report.parent.is_dir():
        raise UsageError(f"--report {report}: the folder {report.parent} does not exist.")
    from g4tool.evaluate.corpus import read_text, shipped_texts
    from g4tool.stages.environment import choose_device
    from g4tool.stages.evaluate import account_note, load_subject, measure
    from g4tool.stages.loading import parse_dtype

    texts = [read_text(text)] if text else shipped_texts()
    numbers, place = parse_dtype(dtype), choose_device(device)

    def load(name: str, folder: Path) -> "Loaded":
        with env.out.progress() as progress:
            return load_subject(name, folder, numbers, place, progress)

    subject = load(model, find_model(env, model, revision))
    reference, note = None, None
    notes = [account_note(subject)] if subject.is_bundle else []
    if against:
        reference = load(against, find_model(env, against, revision))
    elif subject.is_bundle:
        name, source, note = _origin(env, subject.folder)
        reference = load(name, source) if source else None
    with env.out.progress() as progress:
        found = measure(subject, reference, texts, tokens, sweep, progress)
    told = [each for each in (*notes, note) if each]
    found = replace(found, notes=(*found.notes, *told))
    if report:
        from g4tool.evaluate.report import write_report

        write_report(found, report)
    _print(env, found, report)


def _origin(env: Env, bundle: Path) -> tuple[str, Path | None, str | None]:
    """Name and folder of the checkpoint a bundle was made from, or a note why it is not at hand."""
    from g4tool.formats.bundle import lineage_of
    from g4tool.stages.checkpoints import DownloadStage, checkpoint_folder, tiny_model_of

    source = lineage_of(bundle).get("source", {})
    if tiny := tiny_model_of(source.get("files", {})):
        return tiny, find_model(env, tiny, "main"), None
    if source.get("stage") == "download":
        stage = DownloadStage(source["repo"], source["commit"])
        if env.store.plan(stage).action == "reuse":
            return stage.repo, checkpoint_folder(ensure(env, stage)), None
        name = f"{stage.repo} at {stage.commit[:12]}"
    else:
        name = "a folder"
    note = (
        f"Perplexity only: this bundle was made from {name}, which is not in the store; "
        f"give --against for the rest."
    )
    return name, None, note


def _print(env: Env, found: "Evaluation", report: Path | None) -> None:
    from g4tool.evaluate import words
    from g4tool.evaluate.evaluation import to_json

    width = max(len(name) for name, _ in words.figures(found))
    blocks = ["\n".join(f"{name:<{width}}  {value}" for name, value in words.figures(found))]
    if found.beside and found.beside.alone:
        blocks.append(table(words.parts(found.beside), words.PART_HEADER))
    if found.rows:
        rows = [words.sweep_line(row) for row in found.rows]
        blocks.append(table(rows, words.SWEEP_HEADER))
    for note in found.notes:
        env.out.note(note)
    data = {**to_json(found), "report": str(report) if report else None}
    env.out.result(data, "\n\n".join(blocks))
