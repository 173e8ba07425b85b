"""Models: the shape of a transformer.

A `Model` is an architecture, not its weights: `num_layers` blocks of width `hidden`, each an
attention with `num_heads` query heads of width `head_dim` (and `num_kv_heads` key and value heads:
as many in MHA, fewer in GQA, one in MQA; or compressed, in MLA) and an MLP of width `ffn_hidden`,
which in the MoE layers is replaced by experts. Biases, norms and embeddings are named one by one, so
that the parameters are counted to the last one.

Models come from the catalog (`catalog/models.toml`, each entry with its source and the date it was
checked), from a Hugging Face `config.json`, or from arguments.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

from meshwise.core.errors import ModelError
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse

_CATALOG = read_catalog("model_words.toml")
_GATED: dict[str, str] = _CATALOG["gated"]
"""Activations that multiply two projections, and what they do with one of them."""
_MAX_COUNT = 10**9  # far beyond any model, and far below where float64 stops counting
_MAX_LAYERS = 10**5


@dataclass(frozen=True, slots=True, kw_only=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values share one latent.

    Each token keeps `kv_lora_rank + qk_rope_head_dim` numbers; a query head is `qk_nope_head_dim +
    qk_rope_head_dim` wide, a value head `v_head_dim`. `q_lora_rank` 0: queries are not compressed.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        """Width of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """Sparse attention: a query attends to the `top_k` keys that an indexer scores best (0: to all).

    The indexer has `heads` heads of width `head_dim` (DeepSeek-V3.2, arXiv 2512.02556), whose scores are
    added with weights of each token unless `weighted` is False (MiniMax-M3); without heads, a layer uses the
    choice of the layer before it (GLM-5.2). `pool`: the indexer scores so many tokens at once, and chooses
    all of them (GLM-5-Next, Qwen4-Exp). `ratio`: how many tokens one key stands for (DeepSeek-V4, whose
    queries attend to a window of tokens besides); the layers that compress them are `Side`s.
    """

    top_k: int = 0
    heads: int = 0
    head_dim: int = 0
    weighted: bool = True
    pool: int = 1
    ratio: int = 1

    @property
    def tokens_per_score(self) -> int:
        """Tokens that one key of the indexer stands for."""
        return self.ratio * self.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Attention whose queries come through a normalised latent of width `query`, and whose result leaves
    through `groups` latents of width `out`, each of its own part of the heads (DeepSeek-V4; 0: it leaves as
    it is, Step 3).
    """

    query: int
    out: int = 0
    groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A small layer beside the large ones: linear from `d_in` to `d_out`, or `d_out` learned numbers.

    It belongs to `module` (attention, mlp, ...; at the ends of a model: embedding or head). Numbers are
    those of a norm, unless they are used by the op `op`; with `taps` those of a convolution of `d_out`
    channels over so many tokens, each on its own; with `rows` those of a table in which a token looks `times`
    vectors up, and which tensor-parallel ranks share. Each token passes it `times` times, or only every
    `every`-th token does. Every tensor-parallel rank has all of it and does its own tokens. `shared`: a block
    that `shares` weights takes it from the earlier one too. `kept`: the backward needs what it gives.
    """

    module: str
    name: str
    d_out: int
    d_in: int = 0
    bias: bool = False
    op: str = ""
    taps: int = 0
    rows: int = 0
    times: int = 1
    every: int = 1
    shared: bool = False
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """Experts in place of the MLP: each token visits `top_k` of `num_experts`, and all shared ones.

    Layer `i` (from 0) is MoE if `i >= first_dense_layers` and `i - first_dense_layers + 1` divides by
    `every`. `ffn_hidden` is the width of one expert, `shared_ffn_hidden` of all shared experts
    together (`num_shared_experts` only says how many there are). An expert takes at most
    `capacity_factor * top_k * tokens / num_experts` tokens; 0 is dropless. `shared_gate`: a sigmoid gate
    (one output) scales the shared experts. `router_bias`: the router's linear layer has a bias (gpt-oss).
    `balance_bias`: one number per expert is added to the scores and moved by a rule, not by a gradient
    (DeepSeek-V3). `expert_groups`: experts lie in so many groups, of which a token uses the best `top_groups`
    (0: no such limit). `narrow_weights`: the weights of a token's experts are rounded to the type of the
    activations (Qwen3-MoE), which `implementation=huggingface` keeps. `own_norms`: the experts read a norm of
    their own, what they and the shared expert give is normalised before both are added, and learned numbers
    scale the router's input and the weights of the experts (Gemma 4). `latent`: experts read and write so
    many numbers of a token, which a layer before and one behind all experts project (Nemotron 3; 0: as many
    as the model has), behind a norm if `latent_norm` (Kimi K3). `zero_experts`: choices of the router that
    compute nothing (LongCat-Flash). `copies`: redundant experts, which an engine holds beside the others to
    spread the load of those that are liked most (DeepSeek's EPLB). `image_ffn_hidden`: width of as many
    experts for tokens of images, beside those of text (ERNIE 4.5 VL); they are held, and every token is
    priced as one of text.
    """

    num_experts: int
    top_k: int
    ffn_hidden: int
    num_shared_experts: int = 0
    shared_ffn_hidden: int = 0
    first_dense_layers: int = 0
    every: int = 1
    capacity_factor: float = 0.0
    shared_gate: bool = False
    router_bias: bool = False
    balance_bias: bool = False
    expert_groups: int = 0
    top_groups: int = 0
    narrow_weights: bool = False
    own_norms: bool = False
    latent: int = 0
    latent_norm: bool = False
    zero_experts: int = 0
    image_ffn_hidden: int = 0
    copies: int = 0

    @property
    def held(self) -> int:
        """Experts that the expert-parallel ranks hold together, copies among them."""
        return self.num_experts + self.copies

    @property
    def computed(self) -> float:
        """Experts that compute a token on average, with a router that chooses evenly."""
        return self.top_k * self.num_experts / (self.num_experts + self.zero_experts)

    def width(self, hidden: int) -> float:
        """Numbers of a token that its experts read, in a model of width `hidden`."""
        return float(self.latent or hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """The input of a ViT: images of `height` x `width` cut into squares of `patch`, one token each.

    `frames`: as many images, one after the other, are one sequence. `class_token`: one learned token in
    front; `mask_token`: one more learned row, for masked training, which takes no time. `bias`: of the
    projection. `out_channels`: the head predicts that many channels of every pixel (0: no pixel head).
    """

    height: int
    width: int
    patch: int
    channels: int
    frames: int = 1
    out_channels: int = 0
    class_token: bool = False
    mask_token: bool = False
    bias: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens of one image, the class token included."""
        return self.frames * (self.height // self.patch) * (self.width // self.patch) + self.class_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """The input of an encoder of sound: `number` tokens at most, of `seconds` of it.

    Two convolutions over three frames of `channels` channels of a spectrogram each, the second with a step of
    two, make the tokens (Whisper); 0: sides of the embedding do (Gemma 4).
    """

    number: int
    channels: int = 0
    seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """Layers that join an encoder to a language model, whose tokens they give: norms, then linear layers.

    `norms` are of rows, `linears` from a width to another; `num_others`: further learned numbers (tables).
    `norm_params`: learned numbers of a norm for each of its width.
    """

    norms: tuple[int, ...] = ()
    linears: tuple[tuple[int, int], ...] = ()
    bias: bool = True
    norm_params: int = 2
    num_others: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSizing:
    """How a processor cuts an image for an encoder, or sound; `model.inputs` has the kinds.

    `min_pixels` and `max_pixels` of an image, `max_tiles` that it is cut in at most, or the `grids` of them
    (columns, rows), each of `side` pixels (0: of the encoder's). `tokens`: so many of each input, whatever
    its patches (0: as `merge` says). `row_ends`: a token ends each row, and one stands at each end of the
    image.
    """

    kind: str
    min_pixels: int = 0
    max_pixels: int = 0
    max_tiles: int = 0
    grids: tuple[tuple[int, int], ...] = ()
    side: int = 0
    tokens: int = 0
    row_ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """An encoder of images or sound whose tokens a language model reads among those of its text.

    `encoder` is its transformer, `projectors` what joins it to the language model: `merge` of its tokens
    become one there. `sizing` says how an image is cut (`model.inputs`). Of each sequence of the language
    model the encoder reads `num_inputs` sequences of its own, which become `num_tokens` of the sequence (0:
    text alone; the tower then is not part of the model). `crossed`: they do not stand in it, but are
    read by the layers whose mixer is `cross` (Llama 3.2 Vision).
    """

    name: str
    encoder: Model
    sizing: InputSizing
    projectors: tuple[Projector, ...] = ()
    merge: int = 1
    num_inputs: int = 0
    num_tokens: int = 0
    crossed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Diffusion:
    """What a diffusion transformer has beside attention and MLP (DiT, arXiv 2212.09748).

    Its patches are those of a latent image or video: a number of a channel for each square of `side_stride`
    pixels in `frame_stride` frames (the first frame stands alone). One vector of a sequence is the condition:
    the sum of the embedded time, of a text vector of width `pooled_width`, of the guidance (where a model is
    distilled to it) and of one of `num_classes` (each 0 or False: without). It scales and shifts what a norm
    gives, and gates what attention and MLP add: each block projects it (`modulation` block), or adds learned
    numbers to one projection for all blocks (shared: Wan).

    `text`: its `text_tokens` tokens of `text_width` are read by cross-attention (cross), or stand in the same
    sequence as the patches (joint; arXiv 2403.03206); `text_layers` linear layers bring them to the model's
    width, and `refiner_layers` small blocks refine them (HunyuanVideo, arXiv 2412.03603).
    """

    side_stride: int
    frame_stride: int = 1
    modulation: str = "block"
    text: str = ""
    text_tokens: int = 0
    text_width: int = 0
    text_layers: int = 1
    refiner_layers: int = 0
    pooled_width: int = 0
    guidance: bool = False
    num_classes: int = 0

    @property
    def joint_tokens(self) -> int:
        """Tokens of the text in the sequence of the patches."""
        return self.text_tokens if self.text == "joint" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """What reads the source of a model that writes a target (T5, Whisper): its first `num_layers` blocks.

    They see all tokens of the source; the blocks behind them, the decoder, attend to their result as well.
    `seq`: tokens of the source (0: as many as of the target). `channels`: the source is sound in that many
    channels, of which two convolutions over three frames each, the second with a step of two, make the tokens
    (Whisper); 0: tokens of the same vocabulary.
    """

    num_layers: int
    seq: int = 0
    channels: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distances:
    """Disentangled attention (DeBERTa, arXiv 2006.03654): scores of tokens and of the distances between them.

    A table of `rows` distances, with a `norm` or not, is projected in each block like queries and keys (by
    the same weights if `shared`); `num_scores` 2: keys meet distances as queries do, 1: only queries do.
    """

    rows: int
    num_scores: int
    norm: bool
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """What stands in place of attention in some blocks: a state of fixed size that each token updates.

    `kind`: `delta` (Gated DeltaNet, arXiv 2412.06464), `ssd` (Mamba 2, arXiv 2405.21060), `scan` (Mamba,
    arXiv 2312.00752), `linear` (lightning attention, arXiv 2405.17381; mLSTM, arXiv 2405.04517), `wkv`
    (RWKV-7, arXiv 2503.14456), `lru` (Griffin, arXiv 2402.19427), or `conv` (a short convolution between two
    gates, without a state: LFM2); further layers of these are `Side`s. `num_heads`
    heads of width `head_dim`, and in `num_groups` groups their keys and queries of width `state_dim`. A
    causal convolution over `taps` tokens comes first (0: none). `norm`: a gated norm comes last. `dt_rank`:
    rank of the time step of a `scan`; `inner_norms`: it and the keys and queries are normalised (Jamba).
    `gate_rank`: the gates of a `delta`, then one for each channel, come through a layer of that width (Kimi
    Delta Attention, arXiv 2510.26692; 0: they come straight from the input; `wide_gate`: that of the output
    does all the same, Kimi K3). `wide_decay`: they come straight and are one for each channel (Ling 3).
    """

    kind: str
    num_heads: int
    head_dim: int
    num_groups: int = 1
    state_dim: int = 0
    taps: int = 4
    conv_bias: bool = False
    bias: bool = False
    norm: bool = True
    dt_rank: int = 0
    inner_norms: bool = False
    gate_rank: int = 0
    wide_gate: bool = False
    wide_decay: bool = False

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def projected(self) -> dict[str, tuple[int, int]]:
        """What is computed from the input: the width of each, and in how many parts it can be cut at most."""
        keys, heads = (self.num_groups * self.state_dim, self.num_groups), (self.num_heads, 0)
        inner = (self.inner, 0)
        gates = {"z": inner} if not self.gate_rank or self.wide_gate else {}
        gates |= {} if self.gate_rank else {"a": inner if self.wide_decay else heads}
        return {
            "delta": {"q": keys, "k": keys, "v": inner, "b": heads, **gates},
            "ssd": {"z": inner, "x": inner, "b": keys, "c": keys, "dt": heads},
            "scan": {"x": inner, "z": inner},
            "conv": {"b": inner, "c": inner, "x": inner},
            "linear": {"q": keys, "k": keys, "v": inner, "z": inner},
            "wkv": {"q": keys, "k": keys, "v": inner},
            "lru": {"x": inner, "z": inner},
        }[self.kind]

    @property
    def narrow_gates(self) -> tuple[str, ...]:
        """The gates that come through a layer of width `gate_rank`."""
        return ("a", "z")[: (0 if not self.gate_rank else 1 if self.wide_gate else 2)]

    @property
    def convolved(self) -> int:
        """Channels that the convolution runs over."""
        return self.inner + 2 * self.num_groups * self.state_dim * (self.kind in ("delta", "ssd"))


@dataclass(frozen=True, slots=True)
class Layer:
    """What makes one block of a model differ from its others.

    `moe`: experts in place of its MLP. `window`: tokens that its attention looks back on (0: all of them).
    `mixer`: `attention`, `recurrence` in its place, `beside` (both read one norm, and are added), `cross`
    (attention to what the towers give; text alone skips the layer), or `none`.
    `mlp`: whether it has an MLP (or experts) at all. `side`: `encoder` or `decoder` where the model has both;
    in a diffusion transformer `double` where patches and text have weights of their own, but attention
    together, `last` where the text ends with that, `single` where both have the same weights, attention and
    MLP side by side (arXiv 2403.03206; Flux).
    `head_dim`, `num_heads`, `num_kv_heads`, `ffn_hidden`: its own ones (0: those of the model). `keys`,
    `sparse`, `mla`: as of `Model`. `sides`: small layers that it has besides. `shares`: its weights are those
    of an earlier block, run once more (Zamba 2); only sides are its own.
    """

    moe: bool = False
    window: int = 0
    mixer: str = "attention"
    mlp: bool = True
    side: str = ""
    head_dim: int = 0
    num_kv_heads: int = 0
    ffn_hidden: int = 0
    keys: str = ""
    num_heads: int = 0
    sparse: Sparse | None = None
    mla: MLA | None = None
    sides: tuple[Side, ...] = ()
    shares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayer:
    """Per-layer embeddings (Gemma 3n and 4): every block has an embedding of each token of its own.

    A second table of `rows` has a vector of `width` for each block; a projection of the first embedding is
    normalised and added to it. At its end a block gates the vector by its output, projects the product to the
    hidden width, and adds it, normalised.
    """

    rows: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """`number` residual streams; a block computes one (AltUp, arXiv 2301.13310).

    Before a block each stream is predicted from all of them; behind it, each is corrected by what the block
    made of the first. A router of the hidden state says how. The other streams begin as projections of the
    embedding; at the end they are projected and averaged. Beside attention stands a layer of rank
    `laurel_rank` (LAuReL, arXiv 2411.07501). Source: Gemma 3n; that it sets small values of the gate to zero
    in its first ten layers changes no shape and is not priced.

    `laurel_rank` 0: hyper-connections (mHC, arXiv 2512.24880; DeepSeek-V4): before attention and before the
    MLP, a layer that reads all streams says how they are mixed, added up for it, and what each takes of it.
    `between` False: they are not mixed with each other (Hunyuan 4). `gate_rank`: they are normalised, and
    each of their numbers has its own share in the sum, which comes through a layer of that width (Qwen4-Exp).
    """

    number: int
    laurel_rank: int = 0
    between: bool = True
    gate_rank: int = 0

    @property
    def mixes(self) -> int:
        """Numbers by which a hyper-connection mixes streams: to each, from each, and between all."""
        return (1 + (not self.gate_rank) + self.number * self.between) * self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The architecture of one transformer, field by field.

    Biases: `qkv_bias` on the query, key and value projections, `out_bias` on the attention's output
    projection, `linear_bias` on the MLP and the experts, `head_bias` on the LM head. Norms:
    `num_norms` of width `hidden` per block, wherever they stand (2; 1 where one feeds attention and
    MLP both; 4 in Gemma 2); `norm_weight` is False where a norm learns nothing (OLMo).
    `qk_norm` normalises each query and key head with the same weights, or, with `qk_norm_full`, has
    weights (no bias) for the whole projection; `qk_norm_weight` is False where it learns nothing (Llama 4).
    `fused_qkv`: queries, keys and values are views of one matmul's result, of which queries and keys rotate
    in part and are laid out anew (Phi-3), so that `implementation=huggingface` keeps more.
    `layer_scale`: what attention and MLP add to the residual stream is scaled by learned weights (DINOv2).
    `parallel_block`: attention and MLP read the same input and are added together (GPT-J).
    `attention_gate`: a sigmoid of one more projection, as wide as the values, or with one number a head
    (`gate_per_head`), scales what attention gives.
    `sinks`: one learned softmax logit per head (gpt-oss). `sliding_window`: tokens that attention
    looks back on (0: all); each `full_attention_every`-th layer looks back on all (0: none does). `layers`
    says of each block what it is, where no such step does: in place of these two and the pattern of `moe`.
    `attention_softcap`, `logit_softcap`: scores, and the LM head's logits, pass through a tanh (Gemma 2).
    Learned positions have `max_seq + extra_position_rows` rows; `relative` ones add a number to each score,
    learned for each head and each of `relative_buckets` distances (T5). `encoder`, `distances`, `per_layer`,
    `streams`, `diffusion`: see these; a decoder behind an encoder has one norm a block more. `key_bias`
    False: the projection of the keys has no bias (Whisper). `token_types`, and `mlm_transform` (dense layer,
    activation and norm before the LM head), are parts of encoders. In place of the LM head (`lm_head` False)
    there may be a `pooler` (dense layer and tanh) on one token, an `attention_pool` (a learned query attends
    to all tokens, then a norm and an MLP: SigLIP), and a classifier into `num_classes`, with
    `classifier_bias`, on one token or, if it `classifies_tokens`, on all. `mtp_layers`: modules of
    multi-token prediction, each a norm of the embedding and one of the hidden state, their projection, a
    block like the last one, and the model's own head again (DeepSeek-V3); they are trained, but not served.

    `keys`: `values` where keys are values too, before their norm; `same` where they are one and the same,
    in the cache as well (DeepSeek-V4); `shared` where attention reads the keys and values (Gemma 4) or the
    latents (Mistral Large 4) of an earlier block. `v_head_dim`: width of a value head (0: as of a key).
    `sides`: small layers at the ends.

    `towers` stand beside a language model and are priced with it where it reads images or sound.

    `ffn_hidden` is unused where every layer has experts. Descriptive, without a cost: `name`, `source`,
    `checked`, `aliases`, `left_out` (parts that stand beside this model, such as a vision tower, and their
    numbers of parameters; those of `towers` too), `ships_mtp` (whether its checkpoint has modules of
    multi-token prediction, with which engines guess), `quantized` (plan keys that serve weights as the file
    has them), and, unless positions are learned, `max_seq`, which limits a workload.
    """

    name: str
    num_layers: int
    hidden: int
    ffn_hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_seq: int
    activation: str
    norm: str
    linear_bias: bool
    qkv_bias: bool
    out_bias: bool
    positions: str
    tied_embedding: bool
    causal: bool = True
    norm_bias: bool = False
    norm_weight: bool = True
    num_norms: int = 2
    final_norm: bool = True
    embedding_norm: bool = False
    qk_norm: bool = False
    qk_norm_full: bool = False
    qk_norm_weight: bool = True
    fused_qkv: bool = False
    layer_scale: bool = False
    parallel_block: bool = False
    sinks: bool = False
    attention_gate: bool = False
    gate_per_head: bool = False
    attention_softcap: bool = False
    logit_softcap: bool = False
    sliding_window: int = 0
    full_attention_every: int = 0
    layers: tuple[Layer, ...] = ()
    extra_position_rows: int = 0
    relative_buckets: int = 0
    key_bias: bool = True
    token_types: int = 0
    lm_head: bool = True
    head_bias: bool = False
    mlm_transform: bool = False
    pooler: bool = False
    attention_pool: bool = False
    num_classes: int = 0
    classifier_bias: bool = True
    classifies_tokens: bool = False
    mtp_layers: int = 0
    dropout_frac: float = 0.0
    v_head_dim: int = 0
    mla: MLA | None = None
    sparse: Sparse | None = None
    low_rank: LowRank | None = None
    recurrence: Recurrence | None = None
    encoder: Encoder | None = None
    distances: Distances | None = None
    per_layer: PerLayer | None = None
    streams: Streams | None = None
    keys: str = ""
    sides: tuple[Side, ...] = ()
    moe: MoE | None = None
    patches: Patches | None = None
    frames: Frames | None = None
    diffusion: Diffusion | None = None
    towers: tuple[Tower, ...] = ()
    source: str = ""
    checked: str = ""
    aliases: tuple[str, ...] = ()
    left_out: tuple[tuple[str, int], ...] = ()
    ships_mtp: bool = False
    quantized: str = ""

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections (SwiGLU and its like), so has three matrices."""
        return self.activation in _GATED

    @property
    def plain_activation(self) -> str:
        """The activation of one projection, where nothing is multiplied."""
        return _GATED.get(self.activation, self.activation)

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.mla.v_head_dim if self.mla else self.v_head_dim or self.head_dim

    @property
    def gate_dim(self) -> int:
        """Numbers of a head that the gate of attention makes."""
        return 1 if self.gate_per_head else self.value_dim

    @property
    def image_tokens(self) -> int:
        """Tokens of an image, and of the text that joins it; 0 where the model reads none."""
        joint = self.diffusion.joint_tokens if self.diffusion else 0
        return self.patches.num_tokens + joint if self.patches else 0

    @property
    def shares_table(self) -> bool:
        """Whether embeddings are read at both ends: by the head, or to predict further tokens."""
        return self.tied_embedding or self.mtp_layers > 0


def in_sequence(model: Model) -> int:
    """Tokens of a sequence that images and sound become."""
    return sum(tower.num_tokens for tower in model.towers if not tower.crossed)


def across(model: Model) -> int:
    """Tokens of images beside a sequence, which layers of cross-attention read."""
    return sum(tower.num_tokens for tower in model.towers if tower.crossed)


def layer_kind(model: Model, layer: int) -> Layer:
    """The kind of block `layer` (from 0)."""
    if model.layers:
        return model.layers[layer]
    moe, every, side = model.moe, model.full_attention_every, ""
    looks_back_on_all = every > 0 and (layer + 1) % every == 0
    has_experts = False
    if moe is not None and layer >= moe.first_dense_layers:
        has_experts = (layer - moe.first_dense_layers + 1) % moe.every == 0
    if model.encoder:
        side = "encoder" if layer < model.encoder.num_layers else "decoder"
    return Layer(has_experts, 0 if looks_back_on_all else model.sliding_window, side=side)


@lru_cache(maxsize=256)
def layer_counts(model: Model) -> dict[Layer, int]:
    """How many blocks a model has of each kind, in the order in which the kinds first appear."""
    return dict(Counter(layer_kind(model, layer) for layer in range(model.num_layers)))


def layer_kinds(model: Model) -> tuple[Layer, ...]:
    """The distinct kinds of a model's blocks, in the order in which they first appear."""
    return tuple(layer_counts(model))


@lru_cache(maxsize=256)
def of_layer(model: Model, layer: Layer) -> Model:
    """`model` with the sizes, the window and the mask of one of its layers, whose block is to be stated."""
    names = ("head_dim", "num_heads", "num_kv_heads", "ffn_hidden", "keys", "sparse", "mla")
    own: dict[str, Any] = {name: value for name in names if (value := getattr(layer, name))}
    if layer.side == "single":
        own |= {"parallel_block": True, "num_norms": 1, "out_bias": False}
    own["causal"] = model.causal and layer.side != "encoder"
    return replace(model, sliding_window=layer.window, full_attention_every=0, layers=(), **own)


def is_moe_layer(model: Model, layer: int) -> bool:
    """Whether block `layer` (from 0) has experts."""
    return layer_kind(model, layer).moe


def num_moe_layers(model: Model) -> int:
    """How many blocks have experts."""
    return sum(number for layer, number in layer_counts(model).items() if layer.moe)


def num_dense_layers(model: Model) -> int:
    """How many blocks have an ordinary MLP, or none."""
    return model.num_layers - num_moe_layers(model)


# --- checking ----------------------------------------------------------------------------------


def check_count(value: int, what: str, *, zero: bool = False) -> None:
    """Raises `ModelError` unless `value` is a count above zero (or zero, if allowed) of a sensible size."""
    most = _MAX_LAYERS if what.endswith("layers") else _MAX_COUNT
    if not (0 if zero else 1) <= value <= most:
        shown = value if abs(value) < 10**18 else "too large"
        raise ModelError(f"{what} is {shown}; it must be from {0 if zero else 1} to {most}")


_MAY_BE_ZERO = ("vocab", "q_lora_rank", "qk_rope_head_dim", "taps", "num_norms")
"""Counts that may be zero although they have no default; all others may if that is their default."""


def _check_counts(part: Any, where: str) -> None:
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, int) and not isinstance(value, bool):
            zero = field.default == 0 or field.name in _MAY_BE_ZERO
            check_count(value, f"{where}: {field.name}", zero=zero)


def with_capacity(model: Model, factor: float | None) -> Model:
    """`model` with experts that take at most `factor` times an even share of the tokens (None: as it is)."""
    if factor is None:
        return model
    refuse("capacity", ModelError, model=model, factor=factor)
    assert model.moe is not None
    return checked_model(replace(model, moe=replace(model.moe, capacity_factor=factor)), model.name)


def with_copies(model: Model, copies: int) -> Model:
    """`model` with so many redundant experts, as an engine holds it."""
    if not copies:
        return model
    refuse("copies", ModelError, model=model, copies=copies)
    assert model.moe is not None
    return replace(model, moe=replace(model.moe, copies=copies))


def checked_model(model: Model, where: str) -> Model:
    """`model`, if its numbers make sense together; else a `ModelError` that begins with `where`."""
    parts = (getattr(model, field.name) for field in fields(model))
    kinds = set(model.layers)
    own = filter(None, (part for layer in kinds for part in (layer.sparse, layer.mla)))
    for part in (model, *filter(is_dataclass, parts), *kinds, *own):
        _check_counts(part, where)
    for owner, words in _CATALOG["words"].items():
        stated = model if owner == "model" else getattr(model, owner)
        for name, known in words.items() if stated is not None else ():
            if (value := getattr(stated, name)) not in known:
                raise ModelError(f"{where}: {name} is {value!r}; known are {', '.join(known)}")
    layers, patches = model.layers, model.patches
    refuse(
        "model", ModelError, f"{where}: ", model=model, moe=model.moe, mla=model.mla, own=model.recurrence,
        encoder=model.encoder, patches=patches, layers=layers, mixers={layer.mixer for layer in layers},
        layers_moe=any(layer.moe for layer in layers), has_logits=model.lm_head and model.vocab > 0,
    )  # fmt: skip
    return model
