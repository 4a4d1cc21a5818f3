"""Every causal language model of `transformers`, tiny: captured, planned and verified.

python -m tests.zoo.every_causal_lm --found FILE [NAMES]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo.table import markdown, tabulate
from tests.zoo.tiny import causal_lm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="types of models, as in their configurations")
    parser.add_argument("--found", type=Path, required=True, help="rows found, one JSON a line")
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    options = parser.parse_args()
    names = options.names or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows = tabulate(causal_lm, names, options.found, again=bool(options.names))
    if options.markdown:
        options.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
