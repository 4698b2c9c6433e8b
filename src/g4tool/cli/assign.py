"""What `g4 quantize --target-bpw` and `--target-size` do before quantizing: choose bits, say so."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from g4tool.cli.common import Env
from g4tool.cli.models import using_model
from g4tool.cli.output import size
from g4tool.errors import UsageError

if TYPE_CHECKING:
    from g4tool.recipe.model import Recipe

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMG]?B?)")


def parse_size(text: str) -> int:
    """Bytes of "18.5GB", "900 MB" or "2000000". Raises UsageError for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise UsageError(f"--target-size {text}: give a size such as 18.5GB or 900MB.")
    return round(float(found[1]) * _UNITS[found[2].upper()])


def assigned(
    env: Env,
    recipe: "Recipe",
    bits: float | None,
    nbytes: int | None,
    save: Path | None,
    device: str,
) -> "Recipe":
    """The recipe with bits chosen for each matrix by measured sensitivity, saved as a file.

    A file of the same goal from an earlier run is used as it is.
    """
    import torch

    from g4tool.evaluate.corpus import shipped_texts
    from g4tool.files import write_text
    from g4tool.recipe.load import dump
    from g4tool.stages.assign import recipe_of
    from g4tool.stages.evaluate import find_assignment, load_subject

    goal = f"{bits:g}bpw" if bits is not None else f"{size(nbytes or 0)}".replace(" ", "")
    name = f"{Path(recipe.model).name}-{goal}"
    path = save or Path(f"{name}.yaml")
    if path.exists():
        return _chosen_before(env, recipe, path, name)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--save-recipe {path}: the folder {path.parent} does not exist.")
    with using_model(env, recipe.model, recipe.revision) as folder, env.out.progress() as report:
        base = load_subject(recipe.model, folder, torch.float32, device, report)
        found = find_assignment(
            base, shipped_texts(), bits_per_weight=bits, nbytes=nbytes, report=report
        )
    assert recipe.quantize is not None, "the section is there"
    chosen = recipe_of(found.options, name, recipe.model, recipe.revision, recipe.quantize)
    write_text(path, dump(chosen))
    row = found.row
    env.out.note(
        f"bits chosen by measured KL: {size(row.nbytes)}, {row.bits_per_weight:.3f} bits a weight, "
        f"mean KL {row.fidelity.kl_mean:.4g} nats/token; rules written to {path} (g4 build {path})"
    )
    return chosen


def _chosen_before(env: Env, asked: "Recipe", path: Path, name: str) -> "Recipe":
    """The rules that an earlier run chose for this very goal, in the formats that are `asked` for.

    Raises UsageError for other files.
    """
    from g4tool.recipe.load import load_recipe

    found = load_recipe(path)
    if found.name != name:
        raise UsageError(f"{path} is another recipe, {found.name}: name a file with --save-recipe.")
    env.out.note(f"using the rules in {path}; remove the file to measure again")
    assert asked.quantize is not None, "the section is there"
    if found.quantize is None or "formats" not in asked.quantize.model_fields_set:
        return found
    quantize = found.quantize.model_copy(update={"formats": asked.quantize.formats})
    return found.model_copy(update={"quantize": quantize})
