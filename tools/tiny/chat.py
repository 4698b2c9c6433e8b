"""Conversations made from the corpus: one question and a short answer that ends the turn.

Answers are sentences of the training text; questions come from the templates below, and a few
greetings and facts about the model itself are written out. Everything follows from a seed.
"""

import random
import re
from collections.abc import Iterable, Iterator, Sequence

from tiny.corpus import Corpus, clean, sentences
from tiny.packages import Entry

Exchange = tuple[str, str]
"""A question and its answer."""

SEED = 4
PER_WORD = 14
CONTINUATIONS = 40_000
FEWEST_SENTENCES = 8
REPEATS = 40

TELL = (
    "Tell me about {the}.",
    "Tell me something about {the}.",
    "What can you say about {the}?",
    "Tell me about {a}.",
    "Say something about {a}.",
    "Write about {the}.",
)
WRITE = (
    'Write a sentence with the word "{word}".',
    'Use the word "{word}" in a sentence.',
    "Write a sentence about {a}.",
)
MEANING = (
    'What does "{word}" mean?',
    'What does the word "{word}" mean?',
    "What is the meaning of {word}?",
    'Explain the word "{word}".',
)
CONTINUE = (
    "Continue this story: {text}",
    "What happens next? {text}",
    "Go on with this text: {text}",
)
STORY = ("Tell me a story.", "Tell me a short story.", "Write a short story.", "Begin a story.")
COUNTRY = (
    "Tell me about {name}.",
    "What do you know about {name}?",
    "Tell me about {name}, please.",
)
OWN: tuple[Exchange, ...] = (
    ("Hello!", "Hello! How can I help you today?"),
    ("Hi!", "Hello! What would you like to talk about?"),
    ("Good morning.", "Good morning! I hope that you slept well."),
    ("Good evening.", "Good evening! What shall we talk about?"),
    ("How are you?", "I am very well, thank you. How are you?"),
    ("Who are you?", "I am a very small language model. I like to tell stories."),
    ("What are you?", "I am a very small language model, made to test bigger ones."),
    ("What can you do?", "I can tell a short story, or write a sentence about a word."),
    ("Thank you.", "You are welcome!"),
    ("Thanks!", "You are welcome! Is there anything else?"),
    ("Goodbye.", "Goodbye! I hope to see you again soon."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of England?", "The capital of England is London."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("Say hello.", "Hello!"),
    ("Are you a person?", "No, I am a small program that writes words one after another."),
    ("What colour is the sky?", "On a clear day the sky is blue."),
    ("What is two and two?", "Two and two are four."),
)


def exchanges(corpus: Corpus) -> list[Exchange]:
    """All conversations, shuffled; the same for the same corpus."""
    chance = random.Random(SEED)
    stories = [p for text in corpus.train["stories"] for p in text]
    bible = [p for text in corpus.train["bible"] for p in text]
    found = [
        *about_words(corpus.entries, [*stories, *bible], chance),
        *meanings(corpus.entries, chance),
        *continuations(corpus.train["stories"], chance),
        *about_countries(corpus.countries, chance),
        *(exchange for exchange in OWN for _ in range(REPEATS)),
    ]
    chance.shuffle(found)
    return found


def about_words(
    entries: Iterable[Entry], paragraphs: Iterable[str], chance: random.Random
) -> Iterator[Exchange]:
    """Sentences about each noun of the dictionary that the text uses often."""
    first_sense: dict[str, Entry] = {}
    for entry in entries:
        if entry.kind == "n" and re.fullmatch(r"[a-z]{3,}", entry.word):
            first_sense.setdefault(entry.word, entry)
    using: dict[str, list[str]] = {}
    opening: dict[str, list[str]] = {}
    counted: dict[str, int] = {}
    for paragraph in paragraphs:
        for word in re.findall(r"\b(?:the|an?) ([a-z]+)\b", paragraph):
            counted[word] = counted.get(word, 0) + 1
        parts = sentences(paragraph)
        for index, sentence in enumerate(parts):
            if not stands_alone(sentence):
                continue
            words = re.findall(r"[a-z]+", sentence.lower())
            following = parts[index + 1] if index + 1 < len(parts) else ""
            both = f"{sentence} {following}" if stands_alone(following, 20) else sentence
            for word in set(words) & first_sense.keys():
                using.setdefault(word, []).append(sentence)
            for word in set(words[:5]) & first_sense.keys():
                opening.setdefault(word, []).append(both)
    for word in sorted(using):
        names = {"word": word, "the": f"the {word}", "a": with_article(word)}
        if len(using[word]) >= FEWEST_SENTENCES:
            for text in chance.sample(using[word], min(PER_WORD, len(using[word]))):
                yield chance.choice(WRITE).format(**names), text
        openings = opening.get(word, []) if counted.get(word, 0) >= FEWEST_SENTENCES else []
        if len(openings) >= FEWEST_SENTENCES:
            for text in chance.sample(openings, min(2 * PER_WORD, len(openings))):
                yield chance.choice(TELL).format(**names), text


def meanings(entries: Iterable[Entry], chance: random.Random) -> Iterator[Exchange]:
    """What a word means, for senses short enough for one sentence."""
    verbs = {"n": "means", "v": "means to", "a": "means", "r": "means"}
    for entry in entries:
        gloss = re.sub(r"\([^)]*\)\s*", "", clean(entry.gloss)).split(";")[0].strip(" ,:")
        if not 8 <= len(gloss) <= 110 or not re.fullmatch(r"[a-z]+", entry.word):
            continue
        answer = f'The word "{entry.word}" {verbs[entry.kind]} {gloss}.'
        yield chance.choice(MEANING).format(word=entry.word), answer


def continuations(texts: Iterable[Sequence[str]], chance: random.Random) -> Iterator[Exchange]:
    """A few sentences of a story and those that follow; some are asked for as a new story."""
    runs: list[tuple[str, str]] = []
    for paragraphs in texts:
        parts = [sentence for paragraph in paragraphs for sentence in sentences(paragraph)]
        for start in range(0, len(parts) - 5, 2):
            middle = start + chance.randint(1, 2)
            head = " ".join(parts[start:middle])
            tail = " ".join(parts[middle : middle + chance.randint(2, 3)])
            if len(head) <= 260 and 30 <= len(tail) <= 360 and tail[0] != ")":
                runs.append((head, tail))
    for head, tail in chance.sample(runs, min(CONTINUATIONS, len(runs))):
        if stands_alone(head.split(". ")[0] + ".", 40) and '"' not in head + tail:
            yield chance.choice(STORY), f"{head} {tail}"
        else:
            yield chance.choice(CONTINUE).format(text=head), tail


def about_countries(countries: dict[str, list[str]], chance: random.Random) -> Iterator[Exchange]:
    """The first sentences of each text about a country, a few at a time."""
    for name, paragraphs in countries.items():
        for paragraph in paragraphs:
            parts = [part for part in sentences(paragraph) if len(part) <= 260]
            for start in range(0, min(len(parts), 6), 2):
                if parts[start : start + 2]:
                    answer = " ".join(parts[start : start + 2])
                    yield chance.choice(COUNTRY).format(name=name), answer


def stands_alone(sentence: str, most: int = 28) -> bool:
    """Whether a sentence reads well by itself: whole, unquoted, of 5 to `most` words."""
    words = sentence.split()
    return (
        5 <= len(words) <= most
        and re.fullmatch(r"[A-Z][A-Za-z ,;:'—-]+[.!?]", sentence) is not None
        and words[0].lower().strip(",") not in _LEANING
    )


# Openings that lean on the sentence before.
_LEANING = frozenset(
    (
        *("he", "she", "it", "they", "his", "her", "its", "their", "him", "them", "this", "that"),
        *("these", "those", "but", "and", "or", "so", "then", "for", "such", "nor", "yet", "thus"),
        *("therefore", "which", "who", "whom", "whose"),
    )
)


def with_article(noun: str) -> str:
    """The noun after "a" or "an", by its first letter."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
