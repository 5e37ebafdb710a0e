"""Test layouts by Hub id, from a cache without a network or from a server on this machine, and uploads to it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.hub import push_folder
from spkv_nas.cli import main
from spkv_nas.training.branch_config import gates_of_layout

LAYOUT, COMMIT = Layout(("GL", "LL"), 4, "shared"), "a" * 40


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Cache a repository with a layout, as huggingface_hub leaves it, and return its name for layout options."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--hybrid"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(COMMIT)
    (folder / f"snapshots/{COMMIT}").mkdir(parents=True)
    LAYOUT.write(folder / f"snapshots/{COMMIT}/layout.yaml")
    return "hub:org/hybrid"


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_a_layout_is_read_from_the_cache(revision: str, repository: str) -> None:
    assert Layout.read(Path(repository + revision)).content == LAYOUT.content


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "hub:org/none",
            "cannot read layout hub:org/none: the Hub cannot be reached, and its cache",
        ),
        ("hub:org/hybrid@v2", "hub:org/hybrid@v2: the Hub cannot be reached"),
        ("hub:a/b/c", "hub:a/b/c: it must be hub:ORG/NAME or"),
        ("hub:", "it must be hub:ORG/NAME"),
    ],
)
@pytest.mark.usefixtures("repository")
def test_an_offline_failure_is_one_clear_line(source: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^[^\n]*{message}[^\n]*$"):
        Layout.read(source)


def test_commands_and_recipes_take_it(
    repository: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The argument is a path for the command line, and relative paths of a recipe start from its folder."""
    main(["layout", "show", repository])
    assert f"{repository}: {LAYOUT.description}" in capsys.readouterr().out
    main(["layout", "convert", repository, str(tmp_path / "copy.yaml")])
    assert Layout.read(tmp_path / "copy.yaml").content == LAYOUT.content
    assert gates_of_layout({"layout": repository}, tmp_path, "recipe")["window"] == LAYOUT.window


class Answer(BaseHTTPRequestHandler):
    """Answers of the Hub: an error for every file, and that what is pushed arrived."""

    uploaded: dict[str, bytes]
    error = "RepoNotFound"  # of a file

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.reply(401 if self.error == "GatedRepo" else 404, {}, self.error)

    def do_GET(self) -> None:
        self.reply(200, {})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        home = f"http://127.0.0.1:{self.server.server_address[1]}/org/new"
        if self.path.endswith("/create") and json.loads(content)["name"] == "refused":
            self.reply(400, {"error": "no such organization"})
        elif "preupload" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular"}
                for file in json.loads(content)["files"]
            ]
            self.reply(200, {"files": [file | {"shouldIgnore": False} for file in files]})
        else:
            if "/commit/" in self.path:
                files = [
                    line["value"]
                    for line in map(json.loads, content.splitlines())
                    if line["key"] == "file"
                ]
                self.uploaded.update(
                    {file["path"]: base64.b64decode(file["content"]) for file in files}
                )
            self.reply(
                200, {"url": home, "commitOid": COMMIT, "commitUrl": f"{home}/commit/{COMMIT}"}
            )

    def reply(self, status: int, body: object, error: str | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if error is not None:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answer]]:
    """Serve answers in place of the Hub."""
    answer = type("OneAnswer", (Answer,), {"uploaded": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_address[1]}"
        for name, value in {
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "ENDPOINT": home,
            "HUGGINGFACE_CO_URL_TEMPLATE": home + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield answer
        server.shutdown()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RepoNotFound", "there is no such repository, or it is private"),
        ("GatedRepo", "access must be requested on the Hub"),
        ("RevisionNotFound", "the repository has no revision 'v2'"),
        ("EntryNotFound", "the repository has no file layout.yaml"),
    ],
)
def test_a_refusal_of_the_hub_is_one_clear_line(
    error: str, message: str, answer: type[Answer]
) -> None:
    answer.error = error
    with pytest.raises(UserError, match=f"^cannot read layout hub:org/new@v2: {message}[^\n]*$"):
        Layout.read("hub:org/new@v2")


def test_a_folder_is_pushed(answer: type[Answer], tmp_path: Path) -> None:
    LAYOUT.write(tmp_path / "out/layout.yaml")
    (tmp_path / "out/README.md").write_text("---\nlibrary_name: transformers\n---\n")
    assert push_folder(tmp_path / "out", "org/new").endswith("/org/new")
    assert answer.uploaded == {
        file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()
    }
    with pytest.raises(
        UserError,
        match=r"cannot push to org/refused: .*\n.*/out is complete; push it later with: hf",
    ):
        push_folder(tmp_path / "out", "org/refused")


def test_an_offline_push_says_how_to_do_it_later(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"cannot push to org/new: .*offline.*\n.* is complete; .*: hf upload org/new",
    ):
        push_folder(tmp_path, "org/new")
