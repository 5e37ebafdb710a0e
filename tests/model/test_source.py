"""Test models by hub id and revision, read without a network from a cache as the hub's library leaves it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import tiny_model, train_branch
from huggingface_hub.repocard import metadata_load
from transformers import PreTrainedTokenizerBase

from spkv_nas.artifacts.layout import Layout
from spkv_nas.base.errors import UserError
from spkv_nas.base.files import read_json
from spkv_nas.base.records import read_record
from spkv_nas.model.checkpoint import (
    checkpoint_hash,
    load,
    load_tokenizer,
    model_origin,
    read_shape,
    save,
    saved_dtype,
    weights_identity,
)
from spkv_nas.model.export.export import export
from spkv_nas.model.source import check_checkpoint, split_revision
from spkv_nas.model.weight_files import INDEX, content_hashes
from spkv_nas.stages.options.score import ScoreOptions
from spkv_nas.stages.score import run as score
from spkv_nas.stages.sized_model import model_name
from spkv_nas.training.branches import branch_folder
from spkv_nas.training.corpus import Corpus
from spkv_nas.training.dense import dense_checkpoint
from spkv_nas.training.recipe import ModelConfig, Recipe
from spkv_nas.training.variants import Variant

OLD, NEW = "a" * 40, "b" * 40


@dataclass(frozen=True)
class Repository:
    """Repository in the hub's cache: blobs by hash, a folder of links for each commit, and named references."""

    folder: Path
    name: str

    def commit(self, commit: str, files: Path, *names: str) -> None:
        snapshot = self.folder / "snapshots" / commit
        for folder in (snapshot, self.folder / "blobs"):
            folder.mkdir(parents=True, exist_ok=True)
        for file in files.iterdir():
            blob = self.folder / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            file.rename(blob)
            (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
        for name in names:
            (self.folder / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / "refs" / name).write_text(commit)


@pytest.fixture
def repository(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> Repository:
    """Cache ``org/NAME``: a commit tagged v1, and a sharded model in main and in a pull request."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    # Commits are kept by name
    name = "tiny" + hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
    repository = Repository(tmp_path / "hub" / f"models--org--{name}", f"org/{name}")
    for commit, value, names in ((OLD, 1.0, ["v1"]), (NEW, 2.0, ["main", "refs/pr/7"])):
        model = tiny_model(vocab_size=300)
        torch.nn.init.constant_(model.model.norm.weight, value)
        model.save_pretrained(tmp_path / commit, max_shard_size="20KB" if commit == NEW else "1GB")
        tiny_tokenizer.save_pretrained(tmp_path / commit)
        repository.commit(commit, tmp_path / commit, *names)
    return repository


@pytest.mark.parametrize(
    ("revision", "commit"),
    [("", NEW), ("@main", NEW), ("@refs/pr/7", NEW), ("@v1", OLD), (f"@{OLD}", OLD)],
)
def test_a_revision_is_read(revision: str, commit: str, repository: Repository) -> None:
    source = repository.name + revision
    model, tokenizer = load(Path(source))  # as a recipe's model is handed on
    assert model.model.norm.weight[0] == (1.0 if commit == OLD else 2.0)
    assert len(tokenizer) == len(load_tokenizer(source)) == 260
    assert model_origin(source) == {"model": source, "commit": commit}
    assert checkpoint_hash(source) == checkpoint_hash(f"{repository.name}@{commit}")
    assert read_shape(source).num_layers == 4
    assert saved_dtype(source) is torch.float32


def test_a_revision_is_an_argument_too(repository: Repository) -> None:
    assert load(repository.name, revision="v1")[0].model.norm.weight[0] == 1.0
    assert load(repository.name, revision=NEW)[0].model.norm.weight[0] == 2.0


def test_one_commit_is_read_throughout(repository: Repository) -> None:
    """Config and weights come from one commit, even if the branch moves in between."""
    before = checkpoint_hash(repository.name)
    (repository.folder / "refs" / "main").write_text(OLD)
    assert load(repository.name)[0].model.norm.weight[0] == 2.0
    assert checkpoint_hash(repository.name) == before != checkpoint_hash(f"{repository.name}@v1")


@pytest.mark.parametrize("source", ["org/none", "{}@v9", "{}@" + "c" * 40, "{}@v1@v2"])
def test_missing_repositories(source: str, repository: Repository) -> None:
    with pytest.raises(UserError, match="cannot load model org/"):
        load(source.format(repository.name))


def test_an_index_names_only_files_of_the_repository(repository: Repository) -> None:
    index = (repository.folder / "snapshots" / NEW / INDEX).resolve()
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "../../x.safetensors"}}))
    with pytest.raises(UserError, match=r"not a \.safetensors file in the same folder"):
        load(repository.name)


def test_files_of_the_cache_are_carried_over(repository: Repository, tmp_path: Path) -> None:
    """A tokenizer of the hub was written anew, and licences were left behind."""
    snapshot = repository.folder / "snapshots" / NEW
    for name in ("LICENSE", "tokenizer.model"):
        (repository.folder / "blobs" / name).write_text(name)
        (snapshot / name).symlink_to(repository.folder / "blobs" / name)
    save(*load(repository.name), tmp_path / "out")
    for name in ("LICENSE", "tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        assert not (tmp_path / "out" / name).is_symlink()
        assert (tmp_path / "out" / name).read_bytes() == (snapshot / name).read_bytes()


def test_an_adapter_is_named(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "org/base"}'
    )
    adapter = Repository(repository.folder.with_name("models--org--adapter"), "org/adapter")
    adapter.commit("c" * 40, tmp_path / "adapter", "main")
    for check in (load, check_checkpoint):
        with pytest.raises(
            UserError, match="model org/adapter is an adapter of PEFT for org/base: merge it"
        ):
            check(adapter.name)  # type: ignore[operator]


def test_hashes_are_blob_names(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are identified without being read."""
    snapshot = repository.folder / "snapshots" / NEW
    shards = sorted(snapshot.glob("*.safetensors"))
    expected = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in shards}
    identity = weights_identity(snapshot)
    monkeypatch.setattr(
        "spkv_nas.base.manifest.sha256_file", lambda path: pytest.fail(f"reads {path}")
    )
    assert content_hashes(shards) == expected
    assert weights_identity(snapshot) == identity


def test_results_name_the_commit(repository: Repository, text: Path, tmp_path: Path) -> None:
    source = f"{repository.name}@v1"
    Layout(("GL", "LL", "LG", "GG"), 6).write(tmp_path / "layout.yaml")
    score(
        ScoreOptions(
            layouts=[tmp_path / "layout.yaml"],
            model=source,
            data=[str(text)],
            context="32",
            workspace=tmp_path,
        )
    )
    record = read_record(tmp_path / "reports" / model_name(source) / "zero-shot.yaml", "scores")
    assert (record["model"], record["commit"]) == (source, OLD)


def test_a_recipe_starts_from_a_revision(
    repository: Repository, recipe: Recipe, corpus: Corpus, tmp_path: Path
) -> None:
    """Each branch records its revision, and branches of different revisions differ."""
    folders, variant = [], Variant.full_attention()
    for revision, commit in (("v1", OLD), ("main", NEW)):
        model = ModelConfig(path=f"{repository.name}@{revision}")
        changed = recipe.model_copy(update={"model": model, "dense": None})
        dense = dense_checkpoint(changed, corpus, tmp_path)
        folder = branch_folder(changed, dense, tmp_path, variant, 0)
        train_branch(changed, corpus, dense, folder, variant, device="cpu")
        assert read_json(folder / "final" / "run.json", "record")["model_commit"] == commit
        folders.append(folder)
    assert folders[0] != folders[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [("GG", "LL", "LL", "GG"), ("GL", "LL", "LG", "GG")], ids=["native", "custom"]
)
def test_an_export_has_files_and_no_links(
    rows: tuple[str, ...], repository: Repository, tmp_path: Path
) -> None:
    """The card names the repository as the base model, with the licence in its card."""
    out, snapshot = tmp_path / "out", repository.folder / "snapshots" / NEW
    (snapshot / "README.md").write_text("---\nlicense: mit\nbase_model: org/older\n---\n")
    export(Layout(rows, 6), f"{repository.name}@main", out)
    metadata = metadata_load(out / "README.md") or {}
    assert (metadata["base_model"], metadata["license"]) == (repository.name, "mit")
    for file in (*snapshot.glob("*.safetensors"), snapshot / INDEX):
        assert not (out / file.name).is_symlink()
        assert (out / file.name).read_bytes() == file.read_bytes()
    load(out)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_revision("org/name@refs/pr/1") == ("org/name", "refs/pr/1")
    assert model_name("org/name@refs/pr/1") == "name-refs-pr-1"
    assert model_name("org/name") == "name"
    for path in ("./runs/x@3", "/runs/x@3", "runs/a/x@3", "name@", "embedded:dense"):
        assert split_revision(path) == (path, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "name@v1").mkdir()
    assert split_revision("name@v1") == ("name@v1", None)
    assert model_name("name@v1") == "name@v1"
