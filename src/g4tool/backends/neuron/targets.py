"""The chips that Neuron compiles for: memory, cores, and how cores are grouped.

Figures: AWS Neuron documentation, "Neuron hardware" (Inferentia2, Trainium, Trainium2, Trainium3)
and "Logical NeuronCore configuration".
"""

from dataclasses import dataclass
from typing import Literal

from g4tool.errors import UsageError

Target = Literal["inf2", "trn1", "trn2", "trn3"]
GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One kind of chip. `cores` physical cores share `memory` bytes of device memory.

    `lnc` are the numbers of physical cores that one logical core may be made of, the default
    first. `instances` maps an instance type to its chips.
    """

    name: Target
    cores: int
    memory: int
    lnc: tuple[int, ...]
    instances: dict[str, int]

    def core_memory(self, lnc: int) -> int:
        """Bytes that one logical core can use."""
        return self.memory * lnc // self.cores

    def logical_cores(self, chips: int, lnc: int) -> int:
        """Ranks that `chips` chips can run."""
        return chips * self.cores // lnc


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "inf2",
            2,
            32 * GIB,
            (1,),
            {"inf2.xlarge": 1, "inf2.8xlarge": 1, "inf2.24xlarge": 6, "inf2.48xlarge": 12},
        ),
        Chip("trn1", 2, 32 * GIB, (1,), {"trn1.2xlarge": 1, "trn1.32xlarge": 16}),
        Chip("trn2", 8, 96 * GIB, (2, 1), {"trn2.3xlarge": 1, "trn2.48xlarge": 16}),
        # Its instance types are sold by agreement; one chip is what can be counted on.
        Chip("trn3", 8, 144 * GIB, (2, 1), {"one Trainium3 chip": 1}),
    )
}


def chip(name: str) -> Chip:
    """The chip called `name`. Raises UsageError for an unknown one."""
    if name not in CHIPS:
        raise UsageError(f"there is no Neuron target {name!r}; the names are {', '.join(CHIPS)}.")
    return CHIPS[name]


def smallest_instance(made: Chip, ranks: int, lnc: int) -> str | None:
    """The smallest instance with that many logical cores, None where there is none."""
    fits = [name for name, n in made.instances.items() if made.logical_cores(n, lnc) >= ranks]
    return min(fits, key=lambda name: made.instances[name], default=None)
