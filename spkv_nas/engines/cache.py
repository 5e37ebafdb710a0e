"""Describe what the layers of a model keep of a request, and the memory that an engine plans for it.

A ``LayerCache`` is the one description of a layer's cache: plans, limits on memory and the vLLM plug-in count with it,
whether it was read from a config, from the header of a GGUF file, or made from a layout. Imports no torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from spkv_nas.base import units


@dataclass(frozen=True)
class State:
    """State of fixed size of a linear attention, a state space or a short convolution, in numbers."""

    taps: int  # past inputs that the convolution keeps
    channels: int  # channels of the convolution that belong to heads
    groups: int = 0  # groups of heads that share channels of the convolution (B and C of Mamba 2)
    group_channels: int = 0  # channels of a group
    recurrent: int = 0  # numbers of the recurrent state of all heads
    dtype: str | None = None  # of the recurrent state, where the config names one

    def on_rank(self, ranks: int) -> "State":
        """Return the part on one of several tensor-parallel ranks, each of which has a whole number of groups."""
        groups = self.groups if self.groups % ranks == 0 else max(ranks, self.groups)
        return replace(
            self,
            channels=self.channels // ranks,
            groups=groups // ranks,
            recurrent=self.recurrent // ranks,
        )

    @property
    def convolution(self) -> int:
        """Return the numbers of the convolution's state."""
        return self.taps * (self.channels + self.groups * self.group_channels)


@dataclass(frozen=True)
class LayerCache:
    """Describe what a layer, or some of its KV heads, keeps of a request: keys and values of tokens, or a state."""

    num_heads: int = 0  # KV heads; a latent is one
    key_dim: int = 0  # numbers of a key, or of a latent
    value_dim: int = 0  # numbers of a value; 0 where a latent holds both
    window: int | None = None  # recent tokens that are kept, the query's included; None: all
    sinks: int = 0  # first tokens that are kept besides the window
    state: State | None = None  # in place of keys and values

    @property
    def token_numbers(self) -> int:
        """Return the numbers that a token takes."""
        return self.num_heads * (self.key_dim + self.value_dim)

    @property
    def kind(self) -> str:
        """Return what is kept, such as "window 1,024"."""
        if self.state is not None:
            return "linear state" if self.state.recurrent else "convolution state"
        if not self.value_dim:
            return "latent"
        return "global" if self.window is None else f"window {self.window:,}"

    @property
    def size(self) -> str:
        """Return the size of the heads, such as "8 x 128" or "4 x 192 + 128"."""
        if self.state is not None:
            return f"{self.state.convolution + self.state.recurrent:,}"
        if self.value_dim in (0, self.key_dim):
            return f"{self.num_heads} x {self.key_dim}"
        return f"{self.num_heads} x {self.key_dim} + {self.value_dim}"

    def on_rank(self, ranks: int) -> "LayerCache":
        """Return the part on one of several tensor-parallel ranks; each has at least one KV head, and whole latents."""
        if ranks == 1:
            return self
        if self.state is not None:
            return replace(self, state=self.state.on_rank(ranks))
        return replace(self, num_heads=max(1, self.num_heads // ranks))


@dataclass(frozen=True)
class ModelCache:
    """Describe what the layers of a model keep of a request."""

    # A layer whose KV heads have several windows has a part for each
    layers: tuple[LayerCache, ...]
    family: str = ""  # model type
    num_shared: int = 0  # layers that read the keys of another layer
    num_learned_sinks: int = 0  # layers with learned sinks, which are weights
    dtype: str = "bfloat16"  # of activations
    positions: int | None = None  # context length of the model; None if the config does not say
    has_layout: bool = False  # whether windows are those of a layout
    is_split: bool = False  # whether a layer's KV heads may be served apart

    @property
    def parts(self) -> Counter[LayerCache]:
        """Return how many layers, or parts of layers, keep the same."""
        return Counter(self.layers)


@dataclass(frozen=True)
class Row:
    """Memory of the layers that keep the same."""

    layer: LayerCache
    num_layers: int
    request_bytes: int  # that a request takes in all of them


@dataclass(frozen=True)
class CachePlan:
    """Cache that an engine plans for requests of maximum length, in pages of one size that all requests share."""

    page_bytes: int  # bytes of a page in all layers of a group
    request_pages: int  # pages of a request
    rows: tuple[Row, ...] = ()  # memory of a request by what layers keep
    spare_pages: int = 0  # pages that no request gets
    form: str = "whole layers"  # how the layout is served
    notes: tuple[str, ...] = ()  # what the engine does with this model

    @property
    def request_bytes(self) -> int:
        """Return the bytes by which the cache grows with a request."""
        return self.page_bytes * self.request_pages

    def concurrency(self, memory: int) -> float:
        """Return the requests that fit in ``memory`` bytes, as vLLM reports them."""
        return memory // self.page_bytes / self.request_pages

    def memory(self, requests: int) -> int:
        """Return the bytes that requests need."""
        return self.page_bytes * (requests * self.request_pages + self.spare_pages)


@dataclass(frozen=True)
class CacheSettings:
    """CacheSettings of an engine that change its cache."""

    page_size: int  # tokens per page
    in_flight: int  # maximum tokens of all requests in the steps that are scheduled at one time
    kv_dtype: str | None = None  # data type of keys and values; None: the model's, or the engine's
    ranks: int = 1  # tensor-parallel ranks
    has_windows: bool = True  # whether layers with a window drop older tokens
    caches_prefixes: bool = True  # whether requests share the cache of equal beginnings

    def item_bytes(self, dtype: str, sizes: Mapping[str, Fraction]) -> Fraction:
        """Return the bytes of a number in the cache of a model whose activations have a ``dtype``."""
        return sizes[self.kv_dtype or dtype]


def sizes_of(names: Sequence[str] = tuple(units.ITEM_BYTES)) -> dict[str, Fraction]:
    """Return the bytes of a number of each data type."""
    return {name: Fraction(units.ITEM_BYTES[name]) for name in names}


def ceil_divide(number: int, size: int) -> int:
    """Return how many parts of a size hold a number."""
    return -(-number // size)


def round_up(number: int, size: int) -> int:
    """Return the smallest multiple of a size that is no less than a number."""
    return ceil_divide(number, size) * size
