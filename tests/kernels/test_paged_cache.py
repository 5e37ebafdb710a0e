"""Test the paged cache against a plain list of keys per head, and decoding against whole-sequence attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import used_pages
from spkv_kernels import CacheFullError, PagedKVCache, attention, decode_attention, extend_attention
from torch import Tensor

SIZE = 4


@dataclass
class Model:
    """Reference contents of a cache: tokens by sequence, and by head which of them its gate kept."""

    heads: int
    window: int
    # (k [Hkv, D], keep [Hkv]) by position
    tokens: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)

    def expected(self, sequence: int, head: int) -> Tensor:
        tokens = self.tokens[sequence]
        recent = max(0, len(tokens) - self.window)
        rows = [k[head] for i, (k, keep) in enumerate(tokens) if i >= recent or keep[head]]
        return torch.stack(rows) if rows else torch.empty(0, SIZE)


def random_tokens(batch: int, heads: int, number: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, heads, number, SIZE, generator=generator)
    return k, torch.rand(batch, heads, number, generator=generator) < torch.rand(
        batch, heads, 1, generator=generator
    )


def check_against(cache: PagedKVCache, model: Model) -> None:
    for sequence, tokens in enumerate(model.tokens):
        assert cache.seq_lens[sequence] == len(tokens)
        for head in range(model.heads):
            k, v = cache.entries(sequence, head)
            assert torch.equal(k, model.expected(sequence, head))
            assert torch.equal(v, -k)
            assert cache.num_entries[sequence, head] == len(k)
    owned = cache.page_owner[cache.page_owner >= 0]
    table = cache.block_table[cache.block_table >= 0]
    assert len(owned) == len(table) == len(table.unique()) == used_pages(cache), (
        "a page is leaked or shared"
    )
    assert used_pages(cache) == int((-(-cache.lengths // cache.page_size)).sum())


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 7)),
        st.tuples(st.just("prefill"), st.lists(st.integers(0, 11), min_size=3, max_size=3)),
        st.tuples(st.just("free"), st.integers(0, 2)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
        st.tuples(st.just("reload"), st.none()),
    ),
    max_size=14,
)


@settings(deadline=None, max_examples=60)
@given(OPERATIONS, st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**20))
def test_no_entry_is_lost_duplicated_or_leaked(
    operations: list[tuple[str, object]], window: int, page_size: int, seed: int
) -> None:
    batch, heads = 3, 2
    cache = PagedKVCache(batch, heads, SIZE, window=window, page_size=page_size)
    model = Model(heads, window, [[] for _ in range(batch)])
    for number, (name, argument) in enumerate(operations):
        if name == "append":
            k, keep = random_tokens(batch, heads, argument, seed + number)  # type: ignore[arg-type]
            for i in range(k.shape[2]):
                cache.append(k[:, :, i], -k[:, :, i], keep[:, :, i])
            lengths = [k.shape[2]] * batch
        elif name == "prefill":
            lengths = argument  # type: ignore[assignment]
            k, keep = random_tokens(batch, heads, max(lengths), seed + number)
            cache.prefill(k, -k, keep, torch.tensor(lengths))
        elif name == "free":
            cache.free(argument)  # type: ignore[arg-type]
            model.tokens[argument] = []  # type: ignore[call-overload]
            lengths = []
        elif name == "select":
            cache = cache.select(torch.tensor(argument))
            model.tokens = [list(model.tokens[i]) for i in argument]  # type: ignore[attr-defined]
            lengths = []
        else:
            other = PagedKVCache(batch, heads, SIZE, window=window, page_size=page_size)
            other.load_state_dict(cache.state_dict())
            cache, lengths = other, []
        for sequence, length in enumerate(lengths):
            model.tokens[sequence] += [
                (k[sequence, :, i], keep[sequence, :, i]) for i in range(length)
            ]
        check_against(cache, model)


def test_a_full_pool_is_an_error_and_changes_nothing() -> None:
    cache = PagedKVCache(2, 2, SIZE, window=2, page_size=4, max_pages=3)
    k, _ = random_tokens(2, 2, 5, 0)
    cache.prefill(k[:, :, :2], k[:, :, :2], torch.ones(2, 2, 2).bool())
    before = {name: x.clone() for name, x in cache.state_dict().items()}
    for call in (
        lambda: cache.prefill(k, k, torch.ones(2, 2, 5).bool()),
        lambda: cache.append(k[:, :, 0], k[:, :, 0], torch.ones(2, 2).bool()),
    ):
        with pytest.raises(CacheFullError, match=r"needs \d pages of 4 tokens, but max_pages is 3"):
            call()
        assert all(torch.equal(before[name], x) for name, x in cache.state_dict().items())
    cache.free(0)
    cache.append(k[:, :, 0], k[:, :, 0], torch.ones(2, 2).bool())


def test_a_delayed_decision() -> None:
    """A predictor that looks ahead decides some tokens later."""
    cache = PagedKVCache(1, 2, SIZE, window=3)
    k, _ = random_tokens(1, 2, 6, 0)
    for i in range(6):
        cache.append(k[:, :, i], k[:, :, i], torch.zeros(1, 2).bool())
        if i == 2:
            cache.decide(torch.tensor([[True, False]]), age=1)
    assert torch.equal(cache.entries(0, 0)[0], k[0, 0, [1, 3, 4, 5]])
    assert torch.equal(cache.entries(0, 1)[0], k[0, 1, [3, 4, 5]])
    with pytest.raises(ValueError, match="age: expected 0 to 2; found 3"):
        cache.decide(torch.ones(1, 2).bool(), age=3)


def test_bytes_count_kept_entries_and_windows() -> None:
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(4, 2, 4000, 64, generator=generator)
    keep = torch.rand(4, 2, 4000, generator=generator) < 0.2
    cache = PagedKVCache(4, 2, 64, window=128)
    cache.prefill(k, k, keep)
    row = 2 * 64 * 4
    kept = int(cache.num_entries.sum()) * row
    slack = 4 * 2 * cache.page_size * row
    assert kept <= cache.num_bytes <= 1.05 * kept + slack


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("group", [1, 4])
def test_decoding_equals_the_last_row_of_whole_sequence_attention(group: int, backend: str) -> None:
    batch, heads, length, window, size = 2, 3, 60, 7, 8
    generator = torch.Generator().manual_seed(group)
    q = torch.randn(batch, heads * group, length, size, generator=generator, dtype=torch.float64)
    k, v = (
        torch.randn(batch, heads, length, size, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    keep = (
        torch.rand(batch, heads, length, generator=generator)
        < torch.tensor([0.0, 0.3, 1.0])[:, None]
    )
    expected = attention(q, k, v, window=window, keep=keep, backend="reference")
    cache = PagedKVCache(batch, heads, size, window=window, page_size=4, dtype=torch.float64)
    cache.prefill(k[:, :, :20], v[:, :, :20], keep[:, :, :20])
    for i in range(20, length):
        cache.append(k[:, :, i], v[:, :, i], keep[:, :, i])
        actual = decode_attention(q[:, :, i], cache, backend=backend)
        assert torch.allclose(actual, expected[:, :, i], rtol=1e-10)


def test_decoding_after_a_sequence_was_freed() -> None:
    cache = PagedKVCache(2, 1, 8, window=2, page_size=2)
    k = torch.randn(2, 1, 9, 8, generator=torch.Generator().manual_seed(0))
    cache.prefill(k, k, torch.ones(2, 1, 9).bool())
    cache.free(0)
    q = torch.ones(2, 1, 8)
    with pytest.raises(ValueError, match="a sequence is empty"):
        decode_attention(q, cache)
    cache.append(k[:, :, 0], k[:, :, 0], torch.ones(2, 1).bool())
    assert torch.allclose(
        decode_attention(q, cache), decode_attention(q, cache, backend="reference"), atol=1e-6
    )
    assert torch.allclose(decode_attention(q, cache)[0], k[0, :, 0])


@pytest.mark.parametrize("chunks", [[60], [1, 59], [5, 30, 25], [20, 1, 1, 38]], ids=str)
def test_extending_in_chunks_equals_one_pass(
    chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spkv_kernels.decode._QUERIES", 16)
    batch, heads, group, window, size = 2, 3, 2, 7, 8
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(batch, heads * group, 60, size, generator=generator)
    k, v = (torch.randn(batch, heads, 60, size, generator=generator) for _ in range(2))
    keep = (
        torch.rand(batch, heads, 60, generator=generator) < torch.tensor([0.0, 0.3, 1.0])[:, None]
    )
    expected = attention(
        q.double(), k.double(), v.double(), window=window, keep=keep, backend="reference"
    )
    cache = PagedKVCache(batch, heads, size, window=window, page_size=4)
    start = 0
    for number in chunks:
        some = slice(start, start + number)
        actual = extend_attention(
            q[:, :, some], k[:, :, some], v[:, :, some], keep[:, :, some], cache
        )
        assert torch.allclose(actual.double(), expected[:, :, some], atol=2e-6)
        cache.prefill(k[:, :, some], v[:, :, some], keep[:, :, some])
        start += number


@pytest.mark.parametrize("prompt", [1, 2, 30])
@pytest.mark.parametrize("sinks", [[0, 3, 12], [1, 1, 1]], ids=str)
def test_sink_tokens_stay_and_learned_sinks_count(sinks: list[int], prompt: int) -> None:
    """The caller keeps the sink tokens; they move from the ring to pages and stay, however they came."""
    batch, heads, group, window, size = 2, 3, 2, 5, 8
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(batch, heads * group, 60, size, generator=generator, dtype=torch.float64)
    k, v = (
        torch.randn(batch, heads, 60, size, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    learned = {"sink_logits": torch.tensor([3.0, -torch.inf, 0.0, 300.0, -1.0, 1.0]).double()}
    keep = (torch.arange(60) < torch.tensor(sinks)[:, None]).expand(batch, -1, -1)
    expected = attention(
        q, k, v, window=window, sinks=torch.tensor(sinks), **learned, backend="reference"
    )
    cache = PagedKVCache(batch, heads, size, window=window, page_size=4, dtype=torch.float64)
    # A prompt, single tokens, and a second prompt
    parts = [slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, 40)), slice(40, 60)]
    for part in parts:
        extended = extend_attention(
            q[:, :, part], k[:, :, part], v[:, :, part], keep[:, :, part], cache, **learned
        )
        assert torch.allclose(extended, expected[:, :, part], rtol=1e-10)
        if part.stop - part.start > 1:
            cache.prefill(k[:, :, part], v[:, :, part], keep[:, :, part])
        else:
            cache.append(k[:, :, part.start], v[:, :, part.start], keep[:, :, part.start])
        for backend in ("torch", "reference"):
            decoded = decode_attention(q[:, :, part.stop - 1], cache, **learned, backend=backend)
            assert torch.allclose(decoded, expected[:, :, part.stop - 1], rtol=1e-10)
    assert torch.equal(cache.lengths, torch.tensor([sinks] * batch))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window: expected at least 1; found 0"),
    ],
)
def test_sizes_that_make_no_sense(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedKVCache(1, 1, 8, **{"window": 4, **change})


def test_inputs_that_do_not_fit() -> None:
    cache = PagedKVCache(1, 2, 8, window=4)
    good, keep = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3).bool()
    with pytest.raises(ValueError, match=r"v: expected torch\.float32"):
        cache.prefill(good, good.half(), keep)
    with pytest.raises(ValueError, match="keep: expected bool"):
        cache.prefill(good, good, keep.float())
    with pytest.raises(ValueError, match=r"lengths: expected .* from 0 to T = 3"):
        cache.prefill(good, good, keep, torch.tensor([4]))
    with pytest.raises(ValueError, match=r"k: expected torch\.float32 "):
        cache.append(good, good, keep)
    with pytest.raises(
        ValueError, match=r"q: expected \[1, Hq, 8\], Hq a multiple of the cache's 2 heads"
    ):
        decode_attention(torch.zeros(1, 3, 8), cache)
    cache.append(good[:, :, 0], good[:, :, 0], keep[:, :, 0])
    with pytest.raises(
        ValueError, match="backend: expected 'auto', 'reference', 'torch', 'triton'; found 'cpu'"
    ):
        decode_attention(torch.zeros(1, 2, 8), cache, backend="cpu")
    with pytest.raises(ValueError, match=r"sink_logits: expected floating point \[4\]"):
        decode_attention(torch.zeros(1, 4, 8), cache, sink_logits=torch.zeros(2))
    with pytest.raises(ValueError, match=r"sink_logits: expected floating point \[4\]"):
        extend_attention(
            torch.zeros(1, 4, 3, 8), good, good, keep, cache, sink_logits=torch.zeros(4, 1)
        )
