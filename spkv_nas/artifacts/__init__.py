"""What the stages hand each other: layouts, density tables, comparisons, gate configurations. Needs no torch."""
