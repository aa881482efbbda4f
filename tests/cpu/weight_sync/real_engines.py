"""Small models of vLLM and SGLang, built, loaded and updated by those packages' own code, on a CPU.

Run as ``python real_engines.py ENGINE CASE RANK SIZE ADDRESS``, once for every rank. Rank 0 is the trainer as
well; it hands each call to the other ranks. Kernels are never run: where a case wants the weights as a GPU's
kernels want them, only the engine's processing of weights is switched to that.
"""

import json
import os
import sys
import tempfile
import types
from pathlib import Path

import torch

from megatron import weight_sync as ws
from megatron.weight_sync.engines import calls
from megatron.weight_sync.fingerprints import bits_of

H, HEADS, KV, D, INNER, VOCAB, LAYERS, EXPERTS, LATENT = 128, 8, 2, 16, 64, 101, 2, 4, 32
SHAPE = {
    "hidden_size": H,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
LATENT_ATTENTION = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": D,
    "qk_rope_head_dim": D,
    "v_head_dim": D,
    "n_routed_experts": EXPERTS,
    "first_k_dense_replace": LAYERS,
    "n_group": 1,
    "topk_group": 1,
}
MODELS = {
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_tied": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3_moe": MOE,
    "qwen3_moe_reordered": MOE,
    "qwen3_moe_blocks": MOE,
    "latent": LATENT_ATTENTION,
}
PACKED_4_BIT = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64},
}
QUANTISED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "packed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": PACKED_4_BIT},
        "ignore": ["lm_head"],
    },
    "fp8_blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
    "fp8_online": None,
}
MODELS |= {
    case: MODELS["qwen3"] | ({"quantization_config": settings} if settings else {})
    for case, settings in QUANTISED.items()
}


def checkpoint(case, seed):
    """Hugging Face names → random tensors."""
    gen, config, out = torch.Generator().manual_seed(seed), {**SHAPE, **MODELS[case]}, {}

    def put(name, *shape):
        out[f"{name}.weight"] = torch.randn(shape, generator=gen).bfloat16()

    def mlp(p):
        put(p + "gate_proj", INNER, H), put(p + "up_proj", INNER, H), put(p + "down_proj", H, INNER)

    put("model.embed_tokens", VOCAB, H)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        put(p + "input_layernorm", H), put(p + "post_attention_layernorm", H)
        put(p + "self_attn.o_proj", H, HEADS * D)
        if config["model_type"] == "deepseek_v2":
            put(p + "self_attn.q_proj", HEADS * 2 * D, H), put(p + "self_attn.kv_a_layernorm", LATENT)
            put(p + "self_attn.kv_a_proj_with_mqa", LATENT + D, H)
            put(p + "self_attn.kv_b_proj", HEADS * 2 * D, LATENT)
        else:
            put(p + "self_attn.q_proj", HEADS * D, H)
            put(p + "self_attn.k_proj", KV * D, H), put(p + "self_attn.v_proj", KV * D, H)
        if "qwen3" in case:
            put(p + "self_attn.q_norm", D), put(p + "self_attn.k_norm", D)
        if "num_experts" in config:
            put(p + "mlp.gate", EXPERTS, H)
            for e in range(EXPERTS):
                mlp(f"{p}mlp.experts.{e}.")
        else:
            mlp(p + "mlp.")
    put("model.norm", H)
    if not config["tie_word_embeddings"]:
        put("lm_head", VOCAB, H)
    return out


def folder(case):
    path = Path(tempfile.mkdtemp())
    (path / "config.json").write_text(json.dumps({**SHAPE, **MODELS[case]}))
    return str(path)


# ---- vLLM --------------------------------------------------------------------------------------------------


class Vllm:
    def __init__(self, case, rank, size, address):
        import vllm.platforms

        if not torch.cuda.is_available():
            from vllm.platforms.cpu import CpuPlatform

            vllm.platforms._current_platform = CpuPlatform()
            torch.accelerator.synchronize = lambda *args: None
        from vllm import config as c
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        from vllm.v1.worker.gpu_worker import Worker

        from megatron.weight_sync.engines import vllm as adapter

        self.adapter, self.with_config = adapter, c.set_current_vllm_config
        if case in QUANTISED:
            self._quantised()
        if "moe" in case:
            self._kernels_for("FLASHINFER_CUTLASS" if "reordered" in case else "TRITON")
        self.config = c.VllmConfig(
            model_config=c.ModelConfig(
                model=folder(case),
                tokenizer=None,
                skip_tokenizer_init=True,
                dtype="bfloat16",
                enforce_eager=True,
                max_model_len=64,
                quantization="fp8_per_tensor" if case == "fp8_online" else None,
            ),
            device_config=c.DeviceConfig(device="cpu"),
            parallel_config=c.ParallelConfig(
                tensor_parallel_size=size,
                distributed_executor_backend="mp" if size > 1 else None,
                enable_expert_parallel=case == "qwen3_moe" and size > 1,
            ),
        )
        self.config.weight_transfer_config = c.WeightTransferConfig(backend=adapter.BACKEND)
        self.config.parallel_config.rank = rank
        with self.with_config(self.config):
            init_distributed_environment(size, rank, address, rank, "gloo")
            initialize_model_parallel(size, backend="gloo")
        self.model = self.fresh(checkpoint(case, 7), load=case not in QUANTISED or case == "fp8_online")
        adapter.register(), adapter.register()
        self.worker = worker = Worker.__new__(Worker)
        worker.vllm_config, worker.device, worker.rank = self.config, torch.device("cpu"), rank
        worker._weight_update_active = worker._weight_update_is_draft = False
        worker.model_runner = types.SimpleNamespace(
            get_model=lambda: self.model, reset_lora_state=lambda: None
        )
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            self.config.weight_transfer_config, self.config, worker.device, self.model
        )
        worker.init_weight_transfer_engine({})

    @staticmethod
    def _quantised():
        """A GPU that has fp8; the operator in plain torch; no kernels."""
        import vllm._custom_ops
        from vllm.model_executor.layers.quantization import fp8
        from vllm.platforms.cpu import CpuPlatform
        from vllm.platforms.interface import DeviceCapability

        def scaled_fp8_quant(x, scale=None, *args, **options):
            scale = (x.abs().max().float() / 448).reshape(1) if scale is None else scale
            return (x.float() / scale).to(torch.float8_e4m3fn), scale

        vllm._custom_ops.scaled_fp8_quant = scaled_fp8_quant
        fp8.init_fp8_linear_kernel = lambda *args, **options: types.SimpleNamespace()
        CpuPlatform.supported_quantization = []
        CpuPlatform.supports_fp8 = classmethod(lambda cls: True)
        CpuPlatform.get_device_capability = classmethod(lambda cls, *args, **options: DeviceCapability(9, 0))

    @staticmethod
    def _kernels_for(backend):
        from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

        class Method(method.UnquantizedFusedMoEMethod):
            process = method.UnquantizedFusedMoEMethod.process_weights_after_loading

        def no_kernel(self, layer):
            experts = types.SimpleNamespace(
                process_weights_after_loading=lambda layer: None, consumes_expert_mask=False
            )
            self.moe_kernel = types.SimpleNamespace(fused_experts=experts)

        def process(self, layer):
            self.unquantized_backend = UnquantizedMoeBackend[backend]
            Method.process(self, layer)

        method.UnquantizedFusedMoEMethod._init_moe_kernel = no_kernel
        method.UnquantizedFusedMoEMethod.process_weights_after_loading = process

    def fresh(self, tensors, load=True):
        from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
        from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

        self.config.compilation_config.static_forward_context.clear()
        self.config.compilation_config.static_all_moe_layers.clear()
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(self.config)
        torch.set_default_dtype(torch.float32)
        if not load:
            return model
        with self.with_config(self.config):
            model.load_weights(tensors.items())
            if self.config.quant_config is not None:
                finalize_layerwise_processing(model, self.config.model_config)
            process_weights_after_loading(model, self.config.model_config, torch.device("cpu"))
        return model

    def send(self, named):
        info = json.loads(json.dumps(self.adapter.encode(named)))
        self.worker.start_weight_update()
        self.worker.update_weights(info)
        self.worker.finish_weight_update()


# ---- SGLang ------------------------------------------------------------------------------------------------

LOADER = "megatron.weight_sync.engines.sglang.load"


class Sglang:
    def __init__(self, case, rank, size, address):
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import parallel_state
        from sglang.srt.distributed.device_communicators import pynccl
        from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
        from sglang.srt.server_args import ServerArgs

        if "moe_" in case:
            self._layout_of(case)
        args = ServerArgs(
            model_path=folder(case),
            device="cpu",
            tp_size=size,
            ep_size=size if case == "qwen3_moe" else 1,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            custom_weight_loader=[LOADER],
        )
        world_rank = spawn_world_rank(args, tp_rank=rank, pp_rank=0)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=rank))
        initialize_moe_config()
        pynccl.PyNcclCommunicator = lambda **options: types.SimpleNamespace(disabled=True, available=False)
        parallel_state.set_custom_all_reduce(False)
        parallel_state.init_distributed_environment(size, rank, address, rank, "gloo")
        parallel_state.initialize_model_parallel()
        self.size, self.config = size, ModelConfig(model_path=args.model_path, dtype="bfloat16")
        initialize_dp_attention(args)
        init_dp_gathered_buffer(self.config)
        self.model = self.fresh(checkpoint(case, 7))
        self.updater = self._updater()

    @staticmethod
    def _layout_of(case):
        from sglang.srt.layers.moe import MoeRunnerBackend
        from sglang.srt.layers.quantization import unquant

        method = unquant.UnquantizedFusedMoEMethod
        if case == "qwen3_moe_reordered":
            os.environ["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"], unquant._is_cuda = "1", True
            method.get_moe_runner_backend = lambda self, layer: MoeRunnerBackend.TRITON
            return

        def rows(cache, tile, *args, **options):
            return torch.randperm(len(tile), generator=torch.Generator().manual_seed(len(tile)))

        core = types.ModuleType("flashinfer.fused_moe.core")  # any order of rows will do here
        core._maybe_get_cached_w3_w1_permute_indices = core.get_w2_permute_indices_with_cache = rows
        core.convert_to_block_layout = lambda tile, k: (
            tile.view(len(tile), -1, k).permute(1, 0, 2).contiguous()
        )
        for name in ("flashinfer", "flashinfer.fused_moe"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules[core.__name__] = core
        method.use_flashinfer_trtllm_moe = property(lambda self: True, lambda self, value: None)

    def fresh(self, tensors):
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import DefaultModelLoader, _initialize_model

        torch.set_default_dtype(torch.bfloat16)
        model = _initialize_model(self.config, LoadConfig(), None)
        torch.set_default_dtype(torch.float32)
        DefaultModelLoader.load_weights_and_postprocess(model, iter(tensors.items()), torch.device("cpu"))
        return model

    def _updater(self):
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
        from sglang.srt.managers.tp_worker import BaseTpWorker
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.runtime_context import get_model, get_parallel

        unused = ("update_model_fields", "recapture_cuda_graph", "get_model_runner", "model_config")
        runner = types.SimpleNamespace(
            weight_updater=WeightUpdater(
                tp_rank=get_parallel().tp_rank,
                device="cpu",
                gpu_id=0,
                custom_weight_loaders=get_model().custom_weight_loader,
                get_model=lambda: self.model,
                **dict.fromkeys(unused),
            )
        )
        worker = types.SimpleNamespace(
            model_runner=runner, weight_update_runners=lambda: [("target", runner)], draft_runners=None
        )
        worker.deserialize_own_rank = types.MethodType(BaseTpWorker.deserialize_own_rank, worker)
        return SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=lambda **options: True,
            is_fully_idle=None,
            scheduler=types.SimpleNamespace(record_weight_version_change=lambda **options: None),
        )

    def send(self, named):
        from sglang.srt.managers import io_struct
        from sglang.srt.utils.common import normalize_serialized_named_tensor_payloads

        from megatron.weight_sync.engines import sglang as adapter

        payloads = normalize_serialized_named_tensor_payloads(adapter.encode(named, self.size))
        request = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=LOADER
        )
        assert self.updater.begin_weight_update(io_struct.BeginWeightUpdateReqInput()).success
        done = self.updater.update_weights_from_tensor(request)
        assert self.updater.end_weight_update(io_struct.EndWeightUpdateReqInput()).success
        assert done.success, done.message


# ---- what the trainer does --------------------------------------------------------------------------------


def same(a, b):
    """Names of parameters whose bits differ."""
    pairs = zip(a.named_parameters(), b.parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.equal(bits_of(p.data), bits_of(q.data))]


def fill(tensors, old):
    def add(update):
        for name, tensor in tensors.items():
            if update.dense:
                update.add_dense(name, tensor)
            else:
                index = (bits_of(tensor) != bits_of(old[name])).view(-1).nonzero().view(-1)
                update.add_delta(name, index, tensor.view(-1)[index], tensor.shape)
        return ws.fingerprint(tensors)

    return add


def follow(engine, case, rank, size, syncs=3):
    """A dense sync and deltas; returns, on rank 0, what happened."""
    tensors, old, gen = checkpoint(case, 1), {}, torch.Generator().manual_seed(2)
    report = {"differ": [], "error": None, "changed": []}

    def send(receiver_id, named):
        whole = [(name, tensor.numpy().tobytes()) for name, tensor in named]
        torch.distributed.broadcast_object_list([whole])
        engine.send(named)

    sender = ws.Sender("m", lineage=1, encodings=("packed", "entropy"))
    sender.register("engine")
    transport = calls.EngineTransport(send, {"engine": size}, timeout=60.0) if rank == 0 else None
    for k in range(syncs):
        for name, tensor in tensors.items() if k else ():
            old[name], flat = tensor.clone(), tensor.view(-1)
            hit = torch.rand(len(flat), generator=gen) < 0.05
            flat[hit] = torch.randn(int(hit.sum()), generator=gen).bfloat16()
        if rank == 0:
            try:
                report["changed"].append(ws.synchronise(sender, transport, fill(tensors, old)).changed)
            except ws.SyncFailed as failed:
                report["error"] = str(failed)
        else:
            box = [None]
            torch.distributed.broadcast_object_list(box)
            try:
                engine.send([(n, torch.frombuffer(bytearray(b), dtype=torch.uint8)) for n, b in box[0]])
            except ws.WeightSyncError:
                pass
        if case not in QUANTISED:
            report["differ"] += same(engine.model, engine.fresh(tensors))
        stop = [report["error"]]
        torch.distributed.broadcast_object_list(stop)
        if stop[0]:
            break
        receiver = engine.model.__dict__["_weight_sync_receiver"]
        receiver._load = receiver._reload = receiver._recover = None  # deltas need no loader
    if not stop[0]:
        report["boxes"] = sum(len(target.pieces) for target in receiver.targets.values())
    everyone = [None] * size
    torch.distributed.all_gather_object(everyone, report)
    return everyone


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, case, rank, size, address = sys.argv[1:]
    made = {"vllm": Vllm, "sglang": Sglang}[kind](case, int(rank), int(size), address)
    result = follow(made, case, int(rank), int(size))
    if rank == "0":
        print("RESULT", json.dumps(result))
