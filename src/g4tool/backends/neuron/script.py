"""compile.sh: the same compilation by hand, on a machine that has the SDK."""

import shlex

from g4tool.backends.neuron.settings import NeuronOptions

_SCRIPT = """\
#!/bin/sh
# Compiles the model in the folder MODEL with NxD Inference, beside this file's own shards.
# Needs AWS's Neuron SDK and g4tool in the Python that NEURON_PYTHON names (python3 if not set):
#   {install}
# Compiling needs no Neuron device. Nothing here is compiled until this has ended well.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
model=${{1:?usage: compile.sh MODEL (the folder with config.json and the weights)}}
export NEURON_PLATFORM_TARGET_OVERRIDE={target}
export NEURON_LOGICAL_NC_CONFIG={lnc}
# The compilation writes its own neuron_config.json.
[ -f "$here/neuron_config.asked.json" ] ||
  cp "$here/neuron_config.json" "$here/neuron_config.asked.json"
exec "${{NEURON_PYTHON:-python3}}" -m g4tool.backends.neuron.compile_nxdi \\
  --model "$model" --config "$here/neuron_config.asked.json" --out "$here"
"""


def compile_script(options: NeuronOptions, install: str) -> str:
    """The script's text; `install` is the command that installs the SDK."""
    return _SCRIPT.format(install=install, target=shlex.quote(options.chip.name), lnc=options.lnc)
