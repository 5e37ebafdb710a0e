"""Test loading: a checkpoint is read as written, or refused in one line; nothing in it is made up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import Weights, change_config, change_weights, write
from helpers import equal_up_to_rounding, gated, logits
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from spkv_nas.base.errors import UserError
from spkv_nas.base.manifest import MANIFEST, write_manifest
from spkv_nas.model.checkpoint import load, read_shape, save
from spkv_nas.model.weight_files import FILE, INDEX


def without(part: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for name in [name for name in weights if part in name]:
            del weights[name]

    return change


LAYER = "model.layers.2.self_attn"
Q = "model.layers.1.self_attn.q_proj"


class TestWeights:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (without(""), r"lacks 55 of its 55 tensors: .*\.\.\.\nthe folder is incomplete"),
            (without(f"{Q}.weight"), rf"lacks 1 of its 55 tensors: {Q}\.weight"),
            (
                without("utility_predictor"),
                r"lacks 16 of its 55 tensors: model\.layers\.0\.self_attn\.utility",
            ),
            (
                lambda w: w.update({f"{Q}.weight": torch.ones(3, 32)}),
                r"\[3, 32\] in the file, \[32, 32\]",
            ),
            (
                lambda w: w.update(
                    {"model.layers.3.self_attn.utility_predictor.down.weight": torch.ones(5, 16)}
                ),
                r"utility_predictor\.down\.weight: \[5, 16\] in the file, \[2, 16\]",
            ),
            (
                lambda w: w.update({f"{Q}.bias": torch.ones(32)}),
                rf"1 tensors do not exist in the layers .*{Q}\.bias",
            ),
            (
                lambda w: w.update({"layers.9.x": torch.ones(2)}),
                r"1 tensors do not exist in the layers",
            ),
            (
                lambda w: w[f"{Q}.weight"][0].fill_(torch.nan),
                rf"1 tensors hold numbers .* such as {Q}\.weight",
            ),
            (lambda w: w["model.norm.weight"][:1].fill_(torch.inf), "NaN or infinity"),
        ],
        ids=["all", "one", "predictors", "shape", "predictor-shape", "bias", "layer", "nan", "inf"],
    )
    def test_weights_that_do_not_fit_are_refused(
        self, change: Any, message: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Transformers fills missing weights with random numbers and only logs it."""
        write(tmp_path, tiny_tokenizer)
        change_weights(tmp_path, change)
        before = logging.get_verbosity()
        with pytest.raises(UserError, match=f"(?s){message}"):
            load(tmp_path)
        assert logging.get_verbosity() == before

    @pytest.mark.parametrize("kind", ["gated", "dense"])
    def test_weights_too_large_to_compute_with(
        self, kind: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """With one weight of 1e38 all logits were 0, and the NLL was that of a uniform guess."""
        write(tmp_path, tiny_tokenizer, kind)
        change_weights(tmp_path, lambda w: w[f"{Q}.weight"][0, :1].fill_(-1e38))
        with pytest.warns(
            UserWarning, match=rf"1 tensors hold numbers as large as 1e\+38, such as {Q}\.weight"
        ):
            load(tmp_path)

    def test_a_dense_model_with_missing_weights(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        write(tmp_path, tiny_tokenizer, "dense")
        change_weights(tmp_path, without("layers.2."))
        with pytest.raises(UserError, match="lacks 9 of its 39 tensors"):
            load(tmp_path)

    def test_tied_embeddings_are_not_missing(
        self, tmp_path: Path, tokens: Tensor, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        write(tmp_path, tiny_tokenizer, tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(tmp_path / FILE)
        load(tmp_path)
        change_weights(tmp_path, without("embed_tokens"))
        with pytest.raises(
            UserError,
            match=r"lacks 2 of its 55 tensors: lm_head\.weight, model\.embed_tokens\.weight",
        ):
            load(tmp_path)

    def test_heads_for_another_task_are_left_out_aloud(
        self, tmp_path: Path, tokens: Tensor, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        write(tmp_path, tiny_tokenizer)
        expected = logits(load(tmp_path)[0], tokens)
        extra = {
            "v_head.weight": torch.ones(2),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        }
        change_weights(tmp_path, lambda weights: weights.update(extra))
        with pytest.warns(UserWarning, match=r"1 tensors are not used.*: v_head\.weight$"):
            model, _ = load(tmp_path)
        assert equal_up_to_rounding(logits(model, tokens), expected)

    def test_only_pickles(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        write(tmp_path, tiny_tokenizer)
        (tmp_path / FILE).rename(tmp_path / "pytorch_model.bin")
        with pytest.raises(
            UserError, match=r"weights in pytorch_model\.bin, a pickle.*\nconvert it"
        ):
            load(tmp_path)

    def test_none_at_all(self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
        write(tmp_path, tiny_tokenizer)
        (tmp_path / FILE).unlink()
        with pytest.raises(UserError, match="has no weights"):
            load(tmp_path)

    def test_an_adapter_does_not_lead_to_another_model(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        write(tmp_path, tiny_tokenizer)
        (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
        with pytest.raises(UserError, match="is an adapter of PEFT for /elsewhere: merge it"):
            load(tmp_path)

    def test_files_of_the_hub_cache_are_links(
        self, tmp_path: Path, tokens: Tensor, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        folder = write(tmp_path / "blobs", tiny_tokenizer)
        snapshot = tmp_path / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        for number, file in enumerate(sorted(folder.iterdir())):
            file.rename(folder / str(number))
            (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
        load(snapshot)


@pytest.fixture(scope="module")
def sharded(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> Path:
    """Write a sound checkpoint of several shards."""
    folder = tmp_path_factory.mktemp("sharded")
    model = gated()
    save(model, tiny_tokenizer, folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / FILE).unlink(missing_ok=True)
    write_manifest(folder)
    load(folder)
    (folder / MANIFEST).unlink()
    return folder


class TestShards:
    @pytest.fixture
    def folder(self, sharded: Path, tmp_path: Path) -> Path:
        return shutil.copytree(sharded, tmp_path / "sharded")

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            (
                {"metadata": {}, "weight_map": {"a": "../other/model.safetensors"}},
                "not a .safetensors file in the same folder",
            ),
            (
                {"metadata": {}, "weight_map": {"a": "/other/model.safetensors"}},
                "not a .safetensors file in the same folder",
            ),
            (
                {"metadata": {}, "weight_map": {"a": "pytorch_model.bin"}},
                "not a .safetensors file in the same folder",
            ),
            (
                {"metadata": {}, "weight_map": {"a": "x.safetensors"}},
                "x.safetensors, which does not exist",
            ),
            ({"metadata": {}, "weight_map": {"a": 3}}, "'weight_map' must map every tensor"),
            ({"metadata": {}, "weight_map": []}, "'weight_map' must map every tensor"),
            ({"weight_map": {"a": "x.safetensors"}}, "'metadata' must be"),
            ([], "expected keys and values, found list"),
        ],
    )
    def test_an_index_names_only_files_in_its_folder(
        self, index: Any, message: str, folder: Path
    ) -> None:
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(UserError, match=message):
            load(folder)

    def test_a_shard_that_is_left_out_is_missed(self, folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        last = max(index["weight_map"].values())
        index["weight_map"] = {
            name: file for name, file in index["weight_map"].items() if file != last
        }
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(UserError, match="lacks"):
            load(folder)


class TestSection:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda s: s.clear(), "key 'version' is missing"),
            (lambda s: s.update(version=2), "key 'version'"),
            (lambda s: s.pop("gates"), "expected either 'gates' or 'layout'"),
            (
                lambda s: s.update(layout={"heads": ["GL"] * 4, "window": 6}),
                "expected either 'gates' or 'layout'",
            ),
            (lambda s: s["gates"].update(window=10**30), "window"),
            (lambda s: s["gates"].update(window="6"), r"gates\.window"),
            (lambda s: s["gates"].update(tau=float("nan")), r"gates\.tau"),
            (lambda s: s["gates"].pop("tau"), "window and tau are both required"),
            (
                lambda s: s["gates"].update(heads=["SG"] * 3),
                "the grid of the gates' heads is for 3 layers",
            ),
            (lambda s: s["gates"].update(hidden_size=10**12), "of memory"),
            (
                lambda s: s["layers"].pop("model.layers.3.self_attn"),
                "do not exist in the|leaves out attention layer 3",
            ),
            (
                lambda s: s["layers"].update({"model.layers.7.self_attn": s["layers"][LAYER]}),
                "no layer",
            ),
            (lambda s: s["layers"][LAYER].update(num_kv_heads=10**12), "num_kv_heads"),
            (
                lambda s: s["layers"][LAYER].update(native_window=3),
                "do not exist in the layers that its config describes",
            ),
            (lambda s: s.update(layers=[]), "key 'layers'"),
        ],
    )
    def test_damaged(
        self, change: Any, message: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        write(tmp_path, tiny_tokenizer, stock_type=True)
        change_config(tmp_path, lambda config: change(config["spkv"]))
        with pytest.raises(UserError, match=message):
            load(tmp_path)

    @pytest.mark.parametrize("value", [[], None, "x", 0])
    def test_gate_config_that_is_no_mapping(
        self, value: Any, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """An empty value is an error, not a dense model."""
        write(tmp_path, tiny_tokenizer, "hybrid")
        change_config(tmp_path, lambda config: config.update(spkv=value))
        with pytest.raises(UserError, match="section 'spkv'"):
            load(tmp_path)

    def test_gates_without_it(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        write(tmp_path, tiny_tokenizer, stock_type=True)
        change_config(tmp_path, lambda config: config.pop("spkv"))
        with pytest.raises(UserError, match="16 tensors do not exist in the layers"):
            load(tmp_path)

    def test_a_layer_of_a_hybrid_is_left_out(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        write(tmp_path, tiny_tokenizer, "hybrid")
        change_config(
            tmp_path, lambda config: config["spkv"]["layers"].pop("model.layers.3.self_attn")
        )
        with pytest.raises(UserError, match="the layout is for 4 layers"):
            load(tmp_path)


class TestSizes:
    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("num_hidden_layers", 1_000_000, "more than 1,000"),
            ("num_hidden_layers", 2, "there is no layer"),
            ("num_hidden_layers", 5, "lacks"),
            ("vocab_size", 10**12, r"parameters: needs at least .* TiB of memory"),
            ("vocab_size", 10**30, "exceed any machine's memory"),
            ("num_key_value_heads", 10**6, r"for which its weights of .* are too small"),
            ("intermediate_size", 10**12, "of memory"),
        ],
    )
    def test_a_config_beyond_reason(
        self,
        key: str,
        value: int,
        message: str,
        tmp_path: Path,
        tiny_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        write(tmp_path, tiny_tokenizer, stock_type=True)
        change_config(tmp_path, lambda config: config.update({key: value}))
        with pytest.raises(UserError, match=message):
            load(tmp_path)

    def test_a_dense_model_is_not_cut_short(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        write(tmp_path, tiny_tokenizer, "dense")
        change_config(tmp_path, lambda config: config.update(num_hidden_layers=2))
        with pytest.raises(
            UserError, match=r"18 tensors do not exist in the layers .*: model\.layers\.2\."
        ):
            load(tmp_path)

    def test_shapes_of_a_million_layers(
        self, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        write(tmp_path, tiny_tokenizer)
        change_config(tmp_path, lambda config: config.update(num_hidden_layers=10**12))
        with pytest.raises(UserError, match="more than 1,000 are not supported"):
            read_shape(tmp_path / "config.json")
