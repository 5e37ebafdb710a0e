"""Layouts of one proposal, as later stages read them, with their threshold, and the difference of two layouts.

Coverage is a share of the density, and density depends on the threshold tau. So the coverage of a layout must be
computed at the threshold that it was chosen at, not at the probe's. This module reads that threshold from the
provenance in the layout files.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from spkv_nas.artifacts import grid, head_scores, threshold
from spkv_nas.artifacts.layout import GLOBAL, Layout
from spkv_nas.artifacts.tried_layouts import RECOMMENDED
from spkv_nas.base.errors import UserError

Name = TypeVar("Name", int, str)
Value = TypeVar("Value", int, str)
EQUAL_MEMORY = 1.05  # ratio of two KV caches up to which layouts are compared as of the same memory


@dataclass(frozen=True, eq=False)
class Proposal:
    """Layouts by name, with the thresholds at which they were chosen."""

    layouts: dict[str, Layout]  # by strategy, or by file name if two layouts have the same strategy
    # All thresholds named in the files, ascending; empty for layouts made by hand
    taus: tuple[float, ...] = ()
    # Path of each layout, by the same names
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def tau(self) -> float | None:
        """Return the threshold of all layouts that name one; None if none does or if they differ."""
        return self.taus[0] if len(self.taus) == 1 else None

    @property
    def windows(self) -> dict[str, int]:
        """Return the local window of each layout, in keys, by name, without layouts of several windows."""
        return {name: layout.window for name, layout in self.layouts.items() if not layout.windows}

    @property
    def sinks(self) -> dict[str, int]:
        """Return the sink tokens of each layout's local heads, by name; empty if no layout has any."""
        sinks = {name: layout.sinks for name, layout in self.layouts.items()}
        return sinks if any(sinks.values()) else {}

    def warn_of_windows(
        self, others: Mapping[str, int] | None = None, memory: Iterable[float] = ()
    ) -> None:
        """Warn if layouts are compared, with each other or with ``others``, that have different windows or sink tokens.

        ``others`` are windows of other members of the comparison, by name; their gates decide about the first tokens.
        Layouts of different windows can be compared if their KV caches, ``memory``, are known to be equal.
        """
        names = {
            name: f"{name} ({self.files[name]})" if name in self.files else name
            for name in self.layouts
        }
        windows = {names[name]: window for name, window in self.windows.items()}
        if len({*windows.values()}) > 1 and is_equal_memory(memory):
            windows = {}
            others = None
        sinks = {names[name]: number for name, number in self.sinks.items()}
        remedy = "propose all at one {}, or at one --memory"
        warn_of_windows({**windows, **(others or {})}, sinks, remedy=remedy)

    def table(self, table: head_scores.HeadScores) -> head_scores.HeadScores:
        """Return the head scores at the threshold of the proposal, with its number of sink tokens.

        Coverage of its layouts is computed at that threshold. The table's own stays if the proposal has no threshold,
        or several, which is warned of, or if the table has no histogram; the table's sink tokens stay if the layouts
        differ in theirs. Layouts that come from another probe of the same name are warned of, too.
        """
        # Warn of layouts from an earlier probe or from different thresholds
        stale = self._from_earlier_probe(table)
        if stale:
            warnings.warn(
                f"{', '.join(stale)}: proposed from an earlier probe named '{table.name}', not "
                f"from the current one (hash {table.content_hash})\n"
                "run propose again to use the current probe",
                stacklevel=2,
            )
        if len(self.taus) > 1:
            warnings.warn(
                "the layouts were proposed at different thresholds, tau "
                f"{', '.join(f'{tau:g}' for tau in self.taus)}: their coverage is computed at the "
                f"threshold of '{table.name}', tau {table.tau:g}\n"
                "propose them again at one threshold to compare their coverage",
                stacklevel=2,
            )
        # Use the layouts' number of sink tokens and their threshold
        numbers = {layout.sinks for layout in self.layouts.values()}
        if len(numbers) == 1 and numbers != {table.sinks}:
            table = table.with_record(sinks=numbers.pop())
        if self.tau is None or table.histogram is None:
            return table
        if self.tau == threshold.rounded_tau(table.tau):
            return table
        return table.at_tau(self.tau)

    def _from_earlier_probe(self, table: head_scores.HeadScores) -> list[str]:
        """Return the names of the layouts that were proposed from another probe with the name of the table."""
        stale = []
        for name, layout in self.layouts.items():
            if layout.provenance.get("probe") == table.name:
                probe_hash = layout.provenance.get("probe_hash", table.content_hash)
                if probe_hash != table.content_hash:
                    stale.append(name)
        return stale

    @classmethod
    def read(cls, files: Iterable[Path]) -> "Proposal":
        """Read layouts, which are called as ``layout_names`` says; ``UserError`` if two get the same name."""
        layouts: dict[str, Layout] = {}
        paths: dict[str, Path] = {}
        taus = set()
        entries = [(file, Layout.read(file)) for file in files]
        for name, (file, layout) in zip(layout_names(entries), entries, strict=True):
            if name in layouts:
                raise UserError(
                    f"two layouts are called '{name}': rename one of them (key 'strategy')"
                )
            layouts[name] = layout
            paths[name] = file
            # Collect the thresholds
            tau = layout.provenance.get("tau")
            if isinstance(tau, float | int) and not isinstance(tau, bool):
                if not 0 <= tau <= 1:
                    raise UserError(
                        f"layout {file}: its provenance has a tau of {tau}; tau must lie in [0, 1]"
                    )
                taus.add(float(tau))
        return cls(layouts, tuple(sorted(taus)), paths)

    @classmethod
    def read_folder(cls, folder: Path) -> "Proposal":
        """Read the layouts that ``propose`` wrote to ``layouts/<name>/``; ``UserError`` if there are none."""
        # The recommended layout is a copy of another
        files = sorted(file for file in folder.glob("*.yaml") if file.stem != RECOMMENDED)
        if not files:
            raise UserError(f"no layouts in {folder}\nrun propose first, or give layout files")
        return cls.read(files)


def layout_names(entries: Sequence[tuple[Path, Layout]]) -> list[str]:
    """Name layouts by their strategies, with the shortest addition that tells those of one strategy apart.

    That is the first of these in which all of them differ: number of global heads ("densest-12"), window, folder,
    number and folder, file name, folder and file name.
    """
    names = [layout.strategy for _, layout in entries]
    by_strategy = _members(dict(enumerate(names)))
    for strategy, positions in by_strategy.items():
        if len(positions) > 1:
            additions = _distinguishing([_additions(*entries[index]) for index in positions])
            for index, addition in zip(positions, additions, strict=True):
                names[index] = f"{strategy}-{addition}"
    return names


def _distinguishing(additions: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the first kind of addition that tells all layouts apart, or the last, by layout."""
    kinds = list(zip(*additions, strict=True))
    for kind in kinds:
        if len(set(kind)) == len(kind):
            return kind
    return kinds[-1]


def _additions(file: Path, layout: Layout) -> tuple[str, ...]:
    """Return what may tell a layout from another of its strategy, in the order of ``layout_names``."""
    heads = layout.num_global
    folder = file.resolve().parent.name
    windows = "-".join(map(str, layout.legend.values()))
    return (
        str(heads),
        f"window-{windows}",
        folder,
        f"{heads}-{folder}",
        file.stem,
        f"{folder}-{file.stem}",
    )


def is_equal_memory(memory: Iterable[float]) -> bool:
    """Return whether KV caches, in any unit, are known and nearly equal."""
    sizes = [*memory]
    return bool(sizes) and max(sizes) <= EQUAL_MEMORY * min(sizes)


def distinct(layouts: Mapping[str, Layout]) -> dict[str, tuple[str, ...]]:
    """Group the names of identical layouts (same window and grid) by the first name of each group."""
    groups = _members({name: layout.content_hash for name, layout in layouts.items()}).values()
    return {group[0]: tuple(group) for group in groups}


def warn_of_windows(
    windows: Mapping[str, int | None], sinks: Mapping[str, int | None], *, remedy: str
) -> None:
    """Warn if the members of a comparison have different local windows or different numbers of sink tokens.

    Both are by name of the member, with its file if it has one; None if unknown, or where gates decide about the first
    tokens. The ``remedy`` is a clause in which ``{}`` stands for the option that sets them.
    """
    _warn_if_different(
        "local windows", "{} keys", windows, "a longer window lowers", remedy.format("--window")
    )
    _warn_if_different(
        "numbers of sink tokens", "sinks {}", sinks, "sink tokens lower", remedy.format("--sinks")
    )


def warn_of_separators(reports: Mapping[str, Mapping[str, object] | None]) -> None:
    """Warn if members of a comparison have different separators of documents; None: not recorded."""
    separators = {}
    for name, report in reports.items():
        if report is not None:
            known = [str(report[key]) for key in ("best", "documents") if key in report]
            separators[name] = " ".join(known)
    members = _members(separators)
    if len(members) > 1:
        listed = "; ".join(
            f"'{separator}': {', '.join(names)}" for separator, names in members.items()
        )
        warnings.warn(
            f"results on text with different separators of documents are compared ({listed}), "
            "which change what heads attend to: measure all with the same --separator and "
            "--documents",
            stacklevel=3,
        )


def _members(values: Mapping[Name, Value]) -> dict[Value, list[Name]]:
    """Group names by their value."""
    members: dict[Value, list[Name]] = {}
    for name, value in values.items():
        members.setdefault(value, []).append(name)
    return members


def _warn_if_different(
    subject: str, label: str, numbers: Mapping[str, int | None], cause: str, remedy: str
) -> None:
    """Warn if the known numbers of the members of a comparison differ; ``cause`` begins a sentence about the loss."""
    members = _members({name: number for name, number in numbers.items() if number is not None})
    if len(members) > 1:
        listed = "; ".join(
            f"{label.format(number)}: {', '.join(members[number])}" for number in sorted(members)
        )
        warnings.warn(
            f"layouts with {len(members)} different {subject} are compared ({listed})\n"
            f"{cause} the loss whichever heads are global, so the choice of heads cannot be "
            f"compared: {remedy}",
            stacklevel=4,
        )


@dataclass(frozen=True)
class Difference:
    """Difference between the heads of two layouts.

    ``marks`` has a row per layer, a character per KV head: ``"G"`` global in both, ``"."`` local in both, ``"~"`` local
    in both with another window, where one of both has several, ``"-"`` global only in the first, ``"+"`` global only in
    the second.
    """

    marks: tuple[str, ...]

    @classmethod
    def of(cls, first: Layout, second: Layout) -> "Difference":
        """Compare two layouts; ``UserError`` if they have different grids."""
        grid.check_grid(
            "the first layout", first.heads_per_layer, "the second", second.heads_per_layer
        )
        has_several = bool(first.windows or second.windows)

        def mark(window: int | None, other: int | None) -> str:
            if window is None and other is None:
                return GLOBAL
            if window is None:
                return "-"
            if other is None:
                return "+"
            return "~" if has_several and window != other else "."

        marks = []
        for row, other_row in zip(first.head_windows, second.head_windows, strict=True):
            marks.append("".join(map(mark, row, other_row)))
        return cls(tuple(marks))

    @property
    def num_heads(self) -> int:
        """Return the number of KV heads that are global in one layout and local in the other."""
        return sum(row.count("-") + row.count("+") for row in self.marks)

    @property
    def jaccard(self) -> float:
        """Return global heads in both / global heads in either, in [0, 1]; 1 if no head is global."""
        shared = sum(row.count(GLOBAL) for row in self.marks)
        either = shared + self.num_heads
        return shared / either if either else 1.0
