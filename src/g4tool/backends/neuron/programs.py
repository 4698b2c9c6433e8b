"""A rank's programs, checked against the compiler's rules before anything is compiled."""

from g4tool.backends.neuron.findings import Finding
from g4tool.backends.neuron.graph import read_stablehlo
from g4tool.backends.neuron.graph_rules import check_graph
from g4tool.backends.neuron.plan_file import PARTS
from g4tool.backends.neuron.settings import NeuronOptions, buckets, neuron_settings
from g4tool.backends.neuron.stablehlo import rank_graph
from g4tool.parallel.plan import Plan
from g4tool.progress import Progress, Report


def check_programs(plan: Plan, options: NeuronOptions, report: Report) -> list[Finding]:
    """What the compiler would say of a short prompt's program and of one token's.

    Longer buckets differ in lengths only. The programs are g4's own StableHLO, without weights:
    NxD Inference's trace of the port may differ in form.
    """
    settings = neuron_settings(options)
    found: list[Finding] = []
    for done, (part, tokens) in enumerate(
        zip(PARTS, (buckets(options.seq_len)[0], 1), strict=True)
    ):
        report(Progress("check", done, len(PARTS), "programs", part))
        text = rank_graph(plan.config, settings, tokens).text
        found += check_graph(read_stablehlo(part, text), options.chip.name)
    return found
