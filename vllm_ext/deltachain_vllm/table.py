"""The names of vLLM that deltachain takes, by what it does with them; imports no vLLM itself."""

from typing import Final

from deltachain.replica.capabilities import SERVER, Capability, Table

from . import IN_PLACE

_RELOAD: Final = "vllm.model_executor.model_loader.reload"
_LAYERS: Final = "vllm.model_executor.layers"
_CLIENT: Final = "vllm.v1.engine.async_llm:AsyncLLM"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_REQUEST: Final = "vllm.v1.request:Request"
_TRANSFER: Final = "vllm.distributed.weight_transfer"

TABLE: Final = Table(
    engine="vLLM",
    tested=("0.31", "0.32"),
    rows=(
        Capability(
            "asks its workers",
            (
                f"{_CLIENT}.collective_rpc(method, timeout, args, kwargs)",
                "vllm.config:ParallelConfig.worker_extension_cls",
                "vllm.v1.worker.gpu_worker:Worker.model_runner",
                "vllm.v1.worker.gpu_worker:Worker.rank",
                "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model()",
                "vllm.config:VllmConfig",
                "vllm.config:set_current_vllm_config",
                "vllm.utils.torch_utils:set_default_torch_dtype(dtype)",
                "vllm.engine.protocol:EngineClient",
                f"{_CLIENT}.errored",
                f"{_CLIENT}.vllm_config",
            ),
        ),
        Capability(
            "pauses generation",
            (
                f"{_CLIENT}.pause_generation(mode, clear_cache)",
                f"{_CLIENT}.resume_generation()",
                f"{_CLIENT}.is_paused()",
                f"{_CLIENT}.reset_prefix_cache(reset_running_requests, reset_connector)",
            ),
        ),
        Capability(
            "pauses without a wait",
            (
                "vllm.v1.engine.core_client:AsyncMPClient.pause_scheduler_async(mode, clear_cache)",
                "vllm.renderers.base:BaseRenderer.clear_mm_cache_async()",
            ),
            without="each pause takes 20 ms longer",
        ),
        Capability(
            "swaps in its update session",
            (
                f"{_TRANSFER}.base:WeightTransferEngine",
                f"{_TRANSFER}.base:WeightTransferInitInfo",
                f"{_TRANSFER}.base:WeightTransferUpdateInfo",
                f"{_TRANSFER}.base:WeightTransferUpdateRequest(update_info)",
                f"{_TRANSFER}.factory:WeightTransferEngineFactory._registry",
                f"{_TRANSFER}.factory:WeightTransferEngineFactory.register_engine"
                "(name, module_path_or_cls, class_name)",
                f"{_CLIENT}.start_weight_update()",
                f"{_CLIENT}.update_weights(request)",
                f"{_CLIENT}.finish_weight_update()",
            ),
        ),
        Capability(
            "names the version that is served",
            (
                f"{_CLIENT}.update_weight_version(new_version)",
                "vllm.v1.engine.llm_engine:LLMEngine.set_weight_version(weight_version)",
            ),
        ),
        Capability(
            "labels tokens with their version",
            ("vllm.outputs:CompletionOutput.weight_versions",),
            without="no answer tells which versions its tokens are of",
        ),
        Capability(
            "finds its layers",
            (
                "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
                f"{_LAYERS}.linear:LinearBase",
                f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding",
                f"{_LAYERS}.fused_moe.routed_experts:RoutedExperts",
                f"{_LAYERS}.quantization.base_config:QuantizeMethodBase"
                ".process_weights_after_loading(layer)",
                f"{_LAYERS}.attention:is_deferred_attention_layer(layer)",
                f"{_LAYERS}.attention.attention:set_default_quant_scales(layer, register_buffer)",
            ),
        ),
        Capability(
            "reloads and packs layers",
            (
                f"{_RELOAD}.layerwise",
                f"{_RELOAD}.layerwise:initialize_layerwise_reload(model)",
                f"{_RELOAD}.layerwise:finalize_layerwise_reload(model, model_config)",
                f"{_RELOAD}.layerwise:get_layerwise_info(layer)",
                f"{_RELOAD}.layerwise:get_layer_tensors(layer)",
                f"{_RELOAD}.layerwise:restore_layer_on_meta(layer, info)",
                f"{_RELOAD}.layerwise:materialize_layer(layer, info)",
                f"{_RELOAD}.layerwise:_place_kernel_tensors(layer, info)",
                f"{_RELOAD}.layerwise:_get_original_loader(tensor)",
                f"{_RELOAD}.meta:SKIP_TENSORS",
                f"{_RELOAD}.sanitize:layer_ref_sentinel",
                f"{_RELOAD}.types:LayerReloadingInfo.restore_metadata",
                f"{_RELOAD}.types:LayerReloadingInfo.restore_device",
                f"{_RELOAD}.types:LayerReloadingInfo.kernel_tensors",
                f"{_RELOAD}.types:LayerReloadingInfo.load_numel",
                f"{_RELOAD}.types:LayerReloadingInfo.can_load()",
                f"{_RELOAD}.types:LayerReloadingInfo.reset()",
            ),
        ),
        Capability(
            "refuses several engines",
            (
                "vllm.engine.arg_utils:EngineArgs.create_engine_config",
                "vllm.config:ParallelConfig.data_parallel_size",
                "vllm.config:ParallelConfig._api_process_count",
                "vllm.config:ParallelConfig.enable_eplb",
                "vllm.config:ParallelConfig.enable_expert_parallel",
            ),
        ),
        Capability(
            "adds routes and a leader to a server",
            (
                "vllm.plugins.endpoint_plugins.interface:attach_endpoint_plugins",
                "vllm.plugins.endpoint_plugins.interface:init_endpoint_plugins_state",
            ),
            without="no server follows, only engines in your process",
            needed_by=SERVER,
        ),
        Capability(
            "keeps caches by version",
            (
                f"{_SCHEDULER}.add_request(request)",
                f"{_SCHEDULER}.set_pause_state(pause_state)",
                f"{_SCHEDULER}.waiting",
                f"{_SCHEDULER}.ec_connector",
                f"{_REQUEST}.cache_salt",
                f"{_REQUEST}.mm_features",
                f"{_REQUEST}.num_computed_tokens",
                f"{_REQUEST}.block_hashes",
                f"{_REQUEST}.update_block_hashes()",
            ),
            without=f"pause mode {IN_PLACE} is refused",
            needed_by=IN_PLACE,
        ),
    ),
)
