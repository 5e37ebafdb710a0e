"""Test CSV tables: which values a column accepts, its type once read, and where a mistake is reported."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from spkv_nas.base.errors import UserError
from spkv_nas.base.tables import Column, csv_text, read_table, write_csv

COLUMNS = (
    Column("layer", "whole"),
    Column("share", "number", high=1.0),
    Column("name", default="none"),
    Column("error", "number", default="", gaps=True),
)
TEXT = pd.Series(["a"]).dtype  # by the version of pandas


def read(folder: Path, text: str, *columns: Column, others: bool = False) -> pd.DataFrame:
    """Read the table in a file with ``text``, with ``columns`` or by default ``COLUMNS``."""
    file = folder / "mine.csv"
    file.write_text(text, encoding="utf-8", newline="")
    return read_table(file, "table of shares", columns or COLUMNS, others=others)


def test_columns_come_in_their_order_with_their_types(tmp_path: Path) -> None:
    rows = read(tmp_path, "error,name,share,layer\n,a b,1,0\n0.25,,.5,2e1\n")
    assert list(rows.columns) == ["layer", "share", "name", "error"]
    assert rows["layer"].tolist() == [0, 20]
    assert rows["share"].tolist() == [1.0, 0.5]
    assert rows["name"].tolist() == ["a b", ""]
    np.testing.assert_array_equal(rows["error"], [math.nan, 0.25])
    assert rows.dtypes.tolist() == [np.int64, np.float64, TEXT, np.float64]
    assert rows.index.tolist() == [2, 3]


def test_columns_that_a_table_may_lack(tmp_path: Path) -> None:
    rows = read(tmp_path, "layer,share\n0,1\n1,0\n")
    assert rows["name"].tolist() == ["none", "none"]
    assert rows["error"].isna().all()
    assert rows.dtypes.tolist() == [np.int64, np.float64, TEXT, np.float64]


@pytest.mark.parametrize(
    "text",
    [
        "\ufefflayer,share\n0,1\n",  # Excel puts a mark before the header
        "layer,share\r\n0,1\r\n",
        " layer , share \n 0 , 1 \n",
        "\nlayer,share\n\n0,1\n\n",
        '"layer","share"\n"0","1"',
    ],
    ids=["mark", "line ends", "blanks", "empty lines", "quotes"],
)
def test_forms_of_a_file(tmp_path: Path, text: str) -> None:
    rows = read(tmp_path, text)
    assert (rows["layer"].tolist(), rows["share"].tolist()) == ([0], [1.0])


@pytest.mark.parametrize(
    ("column", "cell", "expected"),
    [
        (Column("x", "whole"), "1.5", "a whole number from 0"),
        (Column("x", "whole"), "-1", "a whole number from 0"),
        (Column("x", "whole"), "", "a whole number from 0"),
        (Column("x", "whole"), "9007199254740994", "a whole number from 0"),
        (Column("x", "whole", low=1), "0", "a whole number from 1"),
        (Column("x", "whole", above=1), "1", "a whole number above 1"),
        (Column("x", "whole", low=1, high=3), "4", "a whole number in [1, 3]"),
        (Column("x", "whole", gaps=True), "x", "a whole number from 0"),
        (Column("x", "number"), "x", "a number from 0"),
        (Column("x", "number"), "nan", "a number from 0"),
        (Column("x", "number"), "inf", "a number from 0"),
        (Column("x", "number"), "1,5", "a number from 0"),
        (Column("x", "number"), "1_000", "a number from 0"),
        (Column("x", "number"), "True", "a number from 0"),
        (Column("x", "number", gaps=True), "nan", "a number from 0"),
        (Column("x", "number", low=-1, high=1), "-1.01", "a number in [-1, 1]"),
        (Column("x", "number", low=-math.inf), "-", "a number"),
        (Column("x", "number", above=0), "0", "a number above 0"),
        (Column("x", "number", above=0), "-1e18", "a number above 0"),
        (Column("x", choices=("0", "1")), "yes", "0 or 1"),
        (Column("x", choices=("0", "1")), "", "0 or 1"),
    ],
)
def test_an_invalid_cell_is_named(tmp_path: Path, column: Column, cell: str, expected: str) -> None:
    right = "1" if column.above is None else "2"
    with pytest.raises(UserError) as error:
        read(
            tmp_path, f'y,x\na,{right}\n\nb,"{cell}"\nc,{right}\nd,"{cell}"\n', Column("y"), column
        )
    assert str(error.value) == (
        f"table of shares {tmp_path / 'mine.csv'}, line 4: column 'x' must be {expected}; found '{cell}'"
    )


def test_valid_cells_are_accepted(tmp_path: Path) -> None:
    cases: list[tuple[Column, str, float | str]] = [
        (Column("x", "whole"), "9007199254740992", 2**53),
        (Column("x", "whole", low=-3), "-3", -3),
        (Column("x", "whole", gaps=True), "7", 7.0),
        (Column("x", "number", low=-1, high=1), "-1", -1.0),
        (Column("x", "number", above=0), "1e-300", 1e-300),
        (Column("x", "number", above=-2), "-1", -1.0),
        (Column("x", choices=("0", "1")), "1", "1"),
        (Column("x"), "nan", "nan"),
        (Column("x"), "007", "007"),
    ]
    cells = [read(tmp_path, f"x\n{cell}\n", column)["x"].tolist() for column, cell, _ in cases]
    assert [(values, type(values[0])) for values in cells] == [
        ([value], type(value)) for *_, value in cases
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine.csv: the file is empty; a table has the columns layer, share"),
        ("\n\n", "mine.csv: the file is empty"),
        ("layer,share\n", "mine.csv: there are no rows below the header"),
        (
            "layer,Share\n0,1\n",
            "column 'share' is missing; a table has layer, share, this one layer, Share",
        ),
        (
            "layer,share,shape\n0,1,2\n",
            "unknown or repeated column 'shape'; expected one of layer, share, name, error",
        ),
        ("layer,share,share\n0,1,1\n", "unknown or repeated column 'share'"),
        ("layer,share\n0,1\n1\n", "mine.csv, line 3: 1 values for 2 columns"),
        ("layer,share\n0,1,2\n", "mine.csv, line 2: 3 values for 2 columns"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, text)
    assert message in str(error.value)
    assert str(error.value).startswith("table of shares ")


def test_other_columns_may_be_allowed(tmp_path: Path) -> None:
    rows = read(tmp_path, "layer,,share,note,\n0,,1,x,\n", others=True)
    assert list(rows.columns) == [column.name for column in COLUMNS]
    with pytest.raises(UserError, match="repeated column 'share'"):
        read(tmp_path, "layer,share,share\n0,1,1\n", others=True)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"table of shares not found: .*none\.csv"):
        read_table(tmp_path / "none.csv", "table of shares", COLUMNS)


def test_written_values(tmp_path: Path) -> None:
    rows = pd.DataFrame(
        {"layer": [0, 1], "share": [1 / 3, 1e-9], "name": ["a,b", ""], "error": [math.nan, 2.0]}
    )
    assert csv_text(rows) == 'layer,share,name,error\n0,0.333333,"a,b",\n1,1e-09,,2\n'
    assert csv_text(rows, digits=2).splitlines()[1] == '0,0.33,"a,b",'
    assert csv_text(rows, digits=None).splitlines()[1] == '0,0.3333333333333333,"a,b",'
    write_csv(tmp_path / "mine.csv", rows, digits=None)
    again = read_table(tmp_path / "mine.csv", "table", COLUMNS)
    pd.testing.assert_frame_equal(again.reset_index(drop=True), rows)


@pytest.mark.parametrize(
    "text",
    ["=1+1", "=HYPERLINK(1)", "+cmd", "-cmd|' /C'!A0", "@SUM(1)", "'=1", "''@x", "=", "+-1a"],
)
def test_text_is_no_formula_in_a_spreadsheet(tmp_path: Path, text: str) -> None:
    """Domains of a data set may begin with "=", and ran in the spreadsheet that opened a table."""
    rows = pd.DataFrame({"layer": [1], "share": [0.5], "name": [text]})
    write_csv(tmp_path / "rows.csv", rows)
    written = (tmp_path / "rows.csv").read_text().splitlines()[1]
    assert written.partition("0.5,")[2].lstrip('"').startswith("'")
    assert read_table(tmp_path / "rows.csv", "table", COLUMNS)["name"].tolist() == [text]


@pytest.mark.parametrize("text", ["-", "--", "-0.5", "+3", "-1e-5", "a=b", "'quoted'", "-inf", ""])
def test_other_text_is_written_as_it_is(tmp_path: Path, text: str) -> None:
    rows = pd.DataFrame({"layer": [1], "share": [-0.0], "name": [text]})
    assert csv_text(rows).splitlines()[1] == f"1,-0,{text}"
