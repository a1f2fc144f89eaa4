"""Where `make develop` puts torchao: beside the environment, not in it, or transformers would import it in every process, half a
second for each of the hundreds that tests start."""

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "torchao"

sys.path.append(str(FOLDER))
