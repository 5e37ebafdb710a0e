"""Write a layout of whole layers, of which one in four is global: the rule that most hybrid models follow.

    python whole_layers.py LAYOUT OUT --window 512

The number of layers and heads, and the sink tokens, are those of LAYOUT. The last of every four layers is global, and
so is the last layer.
"""

import argparse
from pathlib import Path

import numpy as np

from spkv_nas.artifacts.layout import Layout

PERIOD = 4


def main() -> None:
    """Write the layout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layout", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--window", type=int, default=512)
    options = parser.parse_args()
    like = Layout.read(options.layout)
    mask = np.zeros((len(like.heads), len(like.heads[0])), dtype=np.bool_)
    mask[PERIOD - 1 :: PERIOD] = True
    mask[-1] = True
    layout = Layout.from_mask(mask, window=options.window, sinks=like.sinks, strategy="one-in-four")
    layout.write(options.out)


if __name__ == "__main__":
    main()
