import sys
from pathlib import Path

# The tools are scripts: they find their own package beside them.
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
