"""Trains the tiny models that ship with g4: corpus, training, export, figures.

    python tools/train_tiny.py prepare --packages FOLDER
    python tools/train_tiny.py train --model all --seconds 480 --piece 1/3 --out OUT
    python tools/train_tiny.py train --model all --seconds 480 --piece 2/3 --resume OUT --out OUT2
    python tools/train_tiny.py export --from OUT3 --to FOLDER
    python tools/train_tiny.py curve --from OUT3
    python tools/train_tiny.py show --models FOLDER
    python tools/train_tiny.py layers --models FOLDER

`prepare` makes the tokenizer, the packed corpus and the held-out text, from archives that it names
itself (tools/tiny/packages.py); it never downloads. `train` needs torch, numpy and safetensors
only, and uses a GPU where there is one.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BUILD = Path("build/tiny")
MODELS = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b")
LAYER_HEAD = """\
| model | matrix | peak weight / rms | loudest / median channel | peak input / rms | scale p99/p1 |
|---|---|--:|--:|--:|--:|"""
QUESTIONS = ("Tell me about the sea.", 'What does the word "brave" mean?', "Tell me a story.")


def main() -> int:
    """Runs the command; a failure that can be explained is one sentence on standard error."""
    from g4tool.errors import G4Error

    arguments = parse(sys.argv[1:])
    try:
        code: int = arguments.run(arguments)
    except G4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return code


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    prepare_ = commands.add_parser("prepare", help="make the tokenizer and the packed corpus")
    prepare_.add_argument("--packages", type=Path, default=BUILD / "packages")
    prepare_.add_argument("--out", type=Path, default=BUILD)
    prepare_.set_defaults(run=prepare)

    train_ = commands.add_parser("train", help="train for some time, or go on")
    train_.add_argument("--model", choices=("all", *MODELS), default="all")
    train_.add_argument("--data", type=Path, default=BUILD / "corpus.npz")
    train_.add_argument("--out", type=Path, required=True)
    train_.add_argument("--resume", type=Path, help="the folder of the piece before")
    train_.add_argument("--seconds", type=float, default=480.0, help="wall time of this piece")
    train_.add_argument("--steps", type=int, help="end after so many steps instead")
    train_.add_argument("--piece", default="1/1", help="which of how many pieces, as 2/3")
    train_.add_argument("--batch", type=int, default=64)
    train_.add_argument("--rate", type=float, default=3e-3)
    train_.add_argument("--decay", type=float, default=0.1)
    train_.add_argument("--drop", type=float, default=0.1)
    train_.add_argument("--no-compile", dest="compiled", action="store_false")
    train_.set_defaults(run=train)

    export_ = commands.add_parser("export", help="write the trained models as checkpoints")
    export_.add_argument("--from", dest="source", type=Path, required=True)
    export_.add_argument("--to", type=Path, default=BUILD / "models")
    export_.add_argument("--tokenizer", type=Path, default=BUILD / "tokenizer.json")
    export_.set_defaults(run=export)

    curve_ = commands.add_parser("curve", help="print losses by step as a Markdown table")
    curve_.add_argument("--from", dest="source", type=Path, required=True)
    curve_.set_defaults(run=curve)

    for name, run, text in (
        ("show", show, "print held-out perplexity, baselines and sample answers"),
        ("layers", layers, "print outlier channels and scale spread of every kind of matrix"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--models", type=Path, default=BUILD / "models")
        command.add_argument("--data", type=Path, default=BUILD / "corpus.npz")
        command.set_defaults(run=run)
    return parser.parse_args(words)


def prepare(arguments: argparse.Namespace) -> int:
    """Writes tokenizer.json, corpus.npz and, with its sources, the held-out text."""
    from tiny import arrays, corpus, pack, packages, tokenizer

    text = corpus.read_corpus(arguments.packages)
    made = tokenizer.build([p for d in text.train.values() for part in d for p in part])
    arguments.out.mkdir(parents=True, exist_ok=True)
    made.save(str(arguments.out / "tokenizer.json"))
    packed = pack.pack(text, made)
    arrays.save(packed, arguments.out / "corpus.npz")
    held_out = arguments.out / "held-out"
    held_out.mkdir(exist_ok=True)
    for source, paragraphs in text.held_out.items():
        (held_out / f"{source}.txt").write_text("\n".join(paragraphs) + "\n", encoding="utf-8")
    (held_out / "SOURCES.md").write_text(packages.describe(), encoding="utf-8")
    print("| source | training tokens | held-out tokens | bytes a token |\n|---|--:|--:|--:|")
    for source, paragraphs in text.held_out.items():
        ids = packed[f"held-out/{source}"]
        size = sum(len(p.encode()) + 1 for p in paragraphs)
        tokens = len(packed[f"train/{source}"])
        print(f"| {source} | {tokens:,} | {len(ids):,} | {size / (len(ids) - 1):.2f} |")
    for kind in pack.CHAT_KINDS:
        print(f"| {kind} | {len(packed[f'train/{kind}']):,} | | |")
    return 0


def train(arguments: argparse.Namespace) -> int:
    """Trains one model in this process, or all three in processes of their own on one device.

    Together they finish in the time of one piece: while one compiles, the others compute.
    """
    if arguments.model == "all":
        words = sys.argv[1:]
        children = [
            subprocess.Popen([sys.executable, "-u", __file__, *words, "--model", name])
            for name in MODELS
        ]
        return max(abs(child.wait()) for child in children)
    from tiny.train import Plan
    from tiny.train import train as run

    piece, pieces = (int(part) for part in arguments.piece.split("/"))
    plan = Plan(
        seconds=arguments.seconds,
        piece=piece,
        pieces=pieces,
        steps=arguments.steps,
        batch=arguments.batch,
        rate=arguments.rate,
        decay=arguments.decay,
        drop=arguments.drop,
        compiled=arguments.compiled,
    )
    say = lambda text: print(f"{arguments.model}: {text}", flush=True)  # noqa: E731
    run(arguments.model, plan, arguments.data, arguments.out, arguments.resume, say)
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Writes each model into a folder of its name."""
    from tiny.export import export as write

    for name in MODELS:
        files = write(name, arguments.source, arguments.tokenizer, arguments.to / name)
        print(f"{arguments.to / name}: {sum(file.stat().st_size for file in files):,} bytes")
    return 0


def curve(arguments: argparse.Namespace) -> int:
    """Prints the history of every model."""
    from tiny.state import read_state

    print("| model | step | seconds | train | dev | held out |\n|---|--:|--:|--:|--:|--:|")
    for name in MODELS:
        state = read_state(arguments.source, name)
        for record in state.history:
            best = " (kept)" if record["step"] == state.best_step else ""
            print(
                f"| {name} | {record['step']}{best} | {record['seconds']:.0f} | "
                f"{record['train']:.3f} | {record['dev']:.3f} | {record['held_out']:.3f} |"
            )
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Prints perplexities beside the baselines', then three answers of each model."""
    import torch

    from g4tool.checkpoint.load import load_text_model
    from g4tool.checkpoint.reader import open_checkpoint
    from g4tool.generate.chat import load_chat_template
    from g4tool.generate.conversation import Conversation
    from g4tool.generate.tokenizer import Tokenizer
    from tiny import arrays, measure

    packed = arrays.load(arguments.data)
    texts = measure.held_out(packed)
    tokenizer = Tokenizer(arguments.models / MODELS[0])
    size = sum(len(tokenizer.decode(ids.tolist()).encode()) for ids in texts)
    scores = measure.baseline_scores(packed, 4096, size)
    models = {}
    for name in MODELS:
        models[name] = load_text_model(open_checkpoint(arguments.models / name), torch.bfloat16)
        scores[name] = measure.model_score(models[name], texts, size)
    print(f"{sum(map(len, texts)):,} tokens, {size:,} bytes\n")
    print("| model | perplexity a token | perplexity a byte |\n|---|--:|--:|")
    for name, score in scores.items():
        print(f"| {name} | {score.per_token:.2f} | {score.per_byte:.3f} |")
    for name, model in models.items():
        folder = arguments.models / name
        for question in QUESTIONS:
            talk = Conversation(model, Tokenizer(folder), load_chat_template(folder))
            print(f"\n{name}\n> {question}\n{talk.say(question, lambda _: None)}")
    return 0


def layers(arguments: argparse.Namespace) -> int:
    """Prints the layer table of every model."""
    import torch

    from g4tool.checkpoint.load import load_text_model
    from g4tool.checkpoint.reader import open_checkpoint
    from tiny import arrays, batches, measure

    packed = arrays.load(arguments.data)
    rows = batches.consecutive(packed["held-out/stories"], 512)[:, :-1]
    print(LAYER_HEAD)
    for name in MODELS:
        model = load_text_model(open_checkpoint(arguments.models / name), torch.float32)
        for row in measure.layer_table(model, rows):
            numbers = (row.weight_peak, row.channel, row.activation_peak, row.scales)
            cells = ("" if math.isnan(number) else f"{number:.1f}" for number in numbers)
            print(f"| {name} | {row.kind} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
