"""A measured choice of bits as a recipe that anyone can rerun."""

from typing import TYPE_CHECKING

from g4tool.recipe.model import Quantize, Recipe, Rule

if TYPE_CHECKING:
    from g4tool.quantize.options import QuantizeOptions


def recipe_of(
    options: "QuantizeOptions",
    name: str,
    model: str,
    revision: str = "main",
    asked: Quantize | None = None,
) -> Recipe:
    """The recipe whose quantize section stands for `options`; see `g4tool.recipe.load.dump`.

    What `options` do not say, how files are cut, their formats and the device, is as `asked`.
    """
    asked = asked or Quantize()
    rules = [
        Rule.model_validate(
            {k: v for k, v in vars(rule).items() if v is not None},
        )
        for rule in options.rules
    ]
    section = Quantize.model_validate(
        {
            "scheme": options.scheme,
            "group_size": options.group_size,
            "solver": options.solver,
            "layerwise": asked.layerwise,
            "head": options.head,
            "device": asked.device,
            "formats": asked.formats,
            "rules": rules,
        }
    )
    return Recipe(name=name, model=model, revision=revision, quantize=section)
