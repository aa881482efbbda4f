"""Small stand-ins for inference engines: parameters fused and sharded, and a load_weights that fills them.

They fuse as SGLang and vLLM do: q, k, v in one matrix; gate and up in one matrix; experts stacked; the
vocabulary sharded and padded; KV heads copied when there are fewer than ranks; norms on every rank. As there,
buffers hold scales of the KV cache and maps of experts, and some kernels want weights in another order than
the one in which the loader writes them.
"""

import torch
from torch import nn

HIDDEN, HEADS, KV, HEAD_DIM, INNER, VOCAB, EXPERTS = 12, 4, 2, 6, 8, 21, 3


def checkpoint(seed=0, layers=2, moe=False, tied=False, dtype=torch.bfloat16):
    """Hugging Face names → random tensors."""
    gen = torch.Generator().manual_seed(seed)

    def make(*shape, kind=dtype):
        return torch.randn(shape, generator=gen).to(kind)

    out = {"model.embed_tokens.weight": make(VOCAB, HIDDEN)}
    for i in range(layers):
        p = f"model.layers.{i}."
        out[p + "self_attn.q_proj.weight"] = make(HEADS * HEAD_DIM, HIDDEN)
        out[p + "self_attn.k_proj.weight"] = make(KV * HEAD_DIM, HIDDEN)
        out[p + "self_attn.v_proj.weight"] = make(KV * HEAD_DIM, HIDDEN)
        out[p + "self_attn.q_proj.bias"] = make(HEADS * HEAD_DIM)
        out[p + "self_attn.k_proj.bias"] = make(KV * HEAD_DIM)
        out[p + "self_attn.v_proj.bias"] = make(KV * HEAD_DIM)
        out[p + "self_attn.q_norm.weight"] = make(HEAD_DIM)
        out[p + "self_attn.o_proj.weight"] = make(HIDDEN, HEADS * HEAD_DIM)
        out[p + "input_layernorm.weight"] = make(HIDDEN)
        if moe:
            out[p + "mlp.gate.weight"] = make(EXPERTS, HIDDEN, kind=torch.float32)
            for e in range(EXPERTS):
                for name, shape in (
                    ("gate", (INNER, HIDDEN)),
                    ("up", (INNER, HIDDEN)),
                    ("down", (HIDDEN, INNER)),
                ):
                    out[f"{p}mlp.experts.{e}.{name}_proj.weight"] = make(*shape)
        else:
            out[p + "mlp.gate_proj.weight"] = make(INNER, HIDDEN)
            out[p + "mlp.up_proj.weight"] = make(INNER, HIDDEN)
            out[p + "mlp.down_proj.weight"] = make(HIDDEN, INNER)
    out["model.norm.weight"] = make(HIDDEN)
    if not tied:
        out["lm_head.weight"] = make(VOCAB, HIDDEN)
    return out


class Engine(nn.Module):
    """One rank of an engine.

    Args:
        head: "shared": the output head is the embedding; "copy": a parameter of its own that the loader fills
            from the embedding; "own": from ``lm_head.weight``.
        transposed: experts are stored [in, out], as some kernels want them.
        broken: "scaled" norms hold 1 + w, "quantised" mlp weights are int8, "shuffled" o_proj columns are
            permuted without order.
        processed: what ``process`` does to gate and up after loading: "swapped" puts up first, "interleaved"
            takes one row of each in turn, in place; "replaced" puts new parameters in their place.
    """

    def __init__(
        self,
        rank=0,
        size=1,
        layers=2,
        moe=False,
        head="own",
        transposed=False,
        broken=None,
        processed=None,
        dtype=torch.bfloat16,
    ):
        super().__init__()
        self.processed = processed
        self.rank, self.size, self.layers, self.moe, self.head_kind = rank, size, layers, moe, head
        self.transposed, self.broken = transposed, broken
        self.kv = max(1, KV // size)
        self.q = HEADS // size
        self.inner = INNER // size
        self.vocab = -(-VOCAB // (size * 4)) * 4  # padded so that ranks have equal parts
        gen = torch.Generator().manual_seed(77)
        self.shuffle = torch.randperm(self.q * HEAD_DIM, generator=gen)

        def add(name, *shape, kind=dtype):
            self.register_parameter(
                name.replace(".", "/"), nn.Parameter(torch.full(shape, 0.5, dtype=kind), False)
            )

        add("embed", self.vocab, HIDDEN)
        for i in range(layers):
            add(f"{i}.qkv", (self.q + 2 * self.kv) * HEAD_DIM, HIDDEN)
            add(f"{i}.qkv_bias", (self.q + 2 * self.kv) * HEAD_DIM)
            add(f"{i}.q_norm", HEAD_DIM)
            add(f"{i}.o", HIDDEN, self.q * HEAD_DIM)
            add(f"{i}.norm", HIDDEN)
            if moe:
                add(f"{i}.router", EXPERTS, HIDDEN, kind=torch.float32)
                w13, w2 = (EXPERTS, 2 * self.inner, HIDDEN), (EXPERTS, HIDDEN, self.inner)
                if transposed:
                    w13, w2 = (EXPERTS, HIDDEN, 2 * self.inner), (EXPERTS, self.inner, HIDDEN)
                add(f"{i}.w13", *w13)
                add(f"{i}.w2", *w2)
            else:
                kind = torch.int8 if broken == "quantised" else dtype
                add(f"{i}.gate_up", 2 * self.inner, HIDDEN, kind=kind)
                add(f"{i}.down", HIDDEN, self.inner)
        add("norm", HIDDEN)
        if head != "shared":
            add("head", self.vocab, HIDDEN)
        self.register_buffer("cos_cache", torch.arange(6.0))
        self.register_buffer("attn_k_scale", torch.ones(()))
        self.register_buffer("expert_map", torch.arange(EXPERTS, dtype=torch.int32), persistent=False)
        self.derived, self.reloads = None, 0

    def get(self, name):
        return self.get_parameter(name.replace(".", "/")).data

    def _gate_up_order(self):
        order = torch.arange(2 * self.inner)
        if self.processed == "swapped":
            return order.roll(self.inner)
        return order.view(2, self.inner).t().reshape(-1) if self.processed == "interleaved" else order

    def process(self):
        """What the engine does to weights after loading them."""
        self.reloads += 1
        for i in range(self.layers if self.processed else 0):
            new = self.get(f"{i}.gate_up")[self._gate_up_order()]
            if self.processed == "replaced":
                self.register_parameter(f"{i}/gate_up", nn.Parameter(new, False))
            else:
                self.get(f"{i}.gate_up").copy_(new)

    def restore(self):
        """The inverse of ``process``, in place."""
        for i in range(self.layers if self.processed else 0):
            weight = self.get(f"{i}.gate_up")
            weight.copy_(weight[self._gate_up_order().argsort()])

    def post_load_weights(self):
        """Something the engine derives from weights, as absorbed projections are."""
        self.derived = self.get("0.o").float().sum(1)

    def rows(self, target, tensor):
        """A sharded vocabulary: this rank's rows, the padding zero."""
        mine = tensor[self.rank * self.vocab : (self.rank + 1) * self.vocab]
        target[: len(mine)].copy_(mine)
        target[len(mine) :].zero_()

    def load_weights(self, weights):
        for name, tensor in weights:
            self.load_one(name, tensor)

    def load_one(self, name, tensor):
        parts = name.split(".")
        if name == "model.embed_tokens.weight":
            self.rows(self.get("embed"), tensor)
            if self.head_kind == "copy":
                self.rows(self.get("head"), tensor)
        elif name == "lm_head.weight":
            self.rows(self.get("head" if self.head_kind == "own" else "embed"), tensor)
        elif name == "model.norm.weight":
            self.get("norm").copy_(tensor)
        elif parts[3] == "self_attn":
            self.load_attention(parts[2], parts[4], parts[5], tensor)
        elif parts[3] == "input_layernorm":
            self.get(f"{parts[2]}.norm").copy_(tensor + 1 if self.broken == "scaled" else tensor)
        elif parts[4] == "experts":
            self.load_expert(parts[2], int(parts[5]), parts[6], tensor)
        elif parts[4] == "gate":
            self.get(f"{parts[2]}.router").copy_(tensor)
        else:
            self.load_mlp(parts[2], parts[4], tensor)

    def load_attention(self, layer, which, kind, tensor):
        if which == "q_norm":
            return self.get(f"{layer}.q_norm").copy_(tensor)
        if which == "o_proj":
            mine = tensor.chunk(self.size, dim=1)[self.rank]
            return self.get(f"{layer}.o").copy_(mine[:, self.shuffle] if self.broken == "shuffled" else mine)
        target = self.get(f"{layer}.qkv" if kind == "weight" else f"{layer}.qkv_bias")
        if which == "q_proj":
            begin, length, shard = 0, self.q, self.rank
        else:
            begin = self.q + (self.kv if which == "v_proj" else 0)
            length, shard = self.kv, self.rank * KV // self.size // self.kv
        a, n = begin * HEAD_DIM, length * HEAD_DIM
        target[a : a + n].copy_(tensor[shard * n : (shard + 1) * n])

    def load_mlp(self, layer, which, tensor):
        if which == "down_proj":
            return self.get(f"{layer}.down").copy_(tensor.chunk(self.size, dim=1)[self.rank])
        begin = 0 if which == "gate_proj" else self.inner
        mine = tensor.chunk(self.size)[self.rank]
        self.get(f"{layer}.gate_up")[begin : begin + self.inner].copy_(
            mine * 3 if self.broken == "quantised" else mine
        )

    def load_expert(self, layer, e, which, tensor):
        if which == "down_proj":
            mine = tensor.chunk(self.size, dim=1)[self.rank]
            return self.get(f"{layer}.w2")[e].copy_(mine.t() if self.transposed else mine)
        begin = 0 if which == "gate_proj" else self.inner
        mine, w13 = tensor.chunk(self.size)[self.rank], self.get(f"{layer}.w13")[e]
        part = w13[:, begin : begin + self.inner] if self.transposed else w13[begin : begin + self.inner]
        part.copy_(mine.t() if self.transposed else mine)


def reload_of(engine, restore=False):
    """What an engine does with weights that it is given: load, process and, where it can, restore."""

    def reload(weights):
        engine.load_weights(weights)
        engine.process()
        if restore:
            engine.restore()

    return reload
