"""Compare the heads of two layouts."""

from dataclasses import dataclass

from spkv_nas.artifacts import grid, layout


@dataclass(frozen=True)
class Difference:
    """Difference between the heads of two layouts.

    ``marks`` has a row per layer, a character per KV head: ``"G"`` global in both, ``"."`` local in both, ``"~"`` local
    in both with another window, where one of both has several, ``"-"`` global only in the first, ``"+"`` global only in
    the second.
    """

    marks: tuple[str, ...]

    @classmethod
    def of(cls, first: layout.Layout, second: layout.Layout) -> "Difference":
        """Compare two layouts; ``UserError`` if they have different grids."""
        grid.check_grid("the first layout", first.heads_per_layer, "the second", second.heads_per_layer)
        has_several = bool(first.windows or second.windows)

        def mark(a: int | None, b: int | None) -> str:
            if a is None or b is None:
                return layout.GLOBAL if a == b else "-" if a is None else "+"
            return "~" if has_several and a != b else "."

        rows = zip(first.head_windows, second.head_windows, strict=True)
        return cls(tuple("".join(map(mark, *pair)) for pair in rows))

    @property
    def num_heads(self) -> int:
        """Return the number of KV heads that are global in one layout and local in the other."""
        return sum(row.count("-") + row.count("+") for row in self.marks)

    @property
    def jaccard(self) -> float:
        """Return global heads in both / global heads in either, in [0, 1]; 1 if no head is global."""
        shared = sum(row.count("G") for row in self.marks)
        return shared / (shared + self.num_heads) if shared + self.num_heads else 1.0
