"""The names of vLLM that deltachain takes, by what it does with them; imports no vLLM itself."""

from typing import Final

from deltachain.replica.capabilities import SERVER, Capability, CapabilityTable, names

from . import IN_PLACE

_LAYERS: Final = "vllm.model_executor.layers"
_CLIENT: Final = "vllm.v1.engine.async_llm:AsyncLLM."
_TRANSFER: Final = "vllm.distributed.weight_transfer"

BALANCED: Final = "enable_eplb"  # the use of an engine that moves experts between slots

SHARED: Final = "shared_experts"
"""The use of engines of several servers that share experts."""

TABLE: Final = CapabilityTable(
    engine="vLLM",
    tested=("0.31", "0.32"),
    rows=(
        Capability(
            "asks its workers",
            names(f"""
                {_CLIENT} collective_rpc(method,timeout,args,kwargs) errored vllm_config
                vllm.engine.protocol: EngineClient
                vllm.config: ParallelConfig.worker_extension_cls
                vllm.v1.worker.gpu_worker:Worker. model_runner rank
                vllm.v1.worker.gpu_model_runner: GPUModelRunner.get_model()
                vllm.config: VllmConfig set_current_vllm_config
                vllm.utils.torch_utils: set_default_torch_dtype(dtype)
            """),
        ),
        Capability(
            "pauses generation",
            names(f"""
                {_CLIENT} pause_generation(mode,clear_cache) resume_generation() is_paused()
                reset_prefix_cache(reset_running_requests,reset_connector)
            """),
        ),
        Capability(
            "pauses without a wait",
            names("""
                vllm.v1.engine.core_client: AsyncMPClient.pause_scheduler_async(mode,clear_cache)
                vllm.renderers.base: BaseRenderer.clear_mm_cache_async()
            """),
            without="each pause takes 20 ms longer",
        ),
        Capability(
            "swaps in its update session",
            names(f"""
                {_TRANSFER}.base: WeightTransferEngine WeightTransferInitInfo
                WeightTransferUpdateInfo WeightTransferUpdateRequest(update_info)
                {_TRANSFER}.factory:WeightTransferEngineFactory. _registry
                register_engine(name,module_path_or_cls,class_name)
                {_CLIENT} start_weight_update() update_weights(request) finish_weight_update()
            """),
        ),
        Capability(
            "publishes as a trainer of its interface",
            names(f"""
                {_TRANSFER}.factory: WeightTransferTrainerFactory
                {_TRANSFER}.base: TrainerInitInfo TrainerWeightTransferEngine
            """),
            without="DeltaChainTrainerInit cannot be imported",
        ),
        Capability(
            "names the version that is served",
            names(f"""
                {_CLIENT} update_weight_version(new_version)
                vllm.v1.engine.llm_engine: LLMEngine.set_weight_version(weight_version)
            """),
        ),
        Capability(
            "labels tokens with their version",
            names("vllm.outputs: CompletionOutput.weight_versions"),
            without="no answer tells which versions its tokens are of",
        ),
        Capability(
            "finds its layers",
            names(f"""
                vllm.model_executor.model_loader.base_loader: BaseModelLoader.load_model
                {_LAYERS}.linear: LinearBase
                {_LAYERS}.vocab_parallel_embedding: VocabParallelEmbedding
                {_LAYERS}.fused_moe.routed_experts: RoutedExperts
                {_LAYERS}.quantization.base_config:
                QuantizeMethodBase.process_weights_after_loading(layer)
                {_LAYERS}.attention: is_deferred_attention_layer(layer)
                {_LAYERS}.attention.attention: set_default_quant_scales(layer,register_buffer)
            """),
        ),
        Capability(
            "reloads and packs layers",
            names("""
                vllm.model_executor.model_loader.reload.layerwise:
                initialize_layerwise_reload(model) finalize_layerwise_reload(model,model_config)
                get_layerwise_info(layer) get_layer_tensors(layer)
                restore_layer_on_meta(layer,info) materialize_layer(layer,info)
                _place_kernel_tensors(layer,info) _get_original_loader(tensor)
                vllm.model_executor.model_loader.reload.meta: SKIP_TENSORS
                vllm.model_executor.model_loader.reload.sanitize: layer_ref_sentinel
                vllm.model_executor.model_loader.reload.types:LayerReloadingInfo.
                restore_metadata restore_device kernel_tensors load_numel can_load() reset()
            """),
        ),
        Capability(
            "updates heads that draft",
            names("""
                vllm.config:SpeculativeConfig. method draft_model_config
                vllm.model_executor.model_loader.mtp_validation: disable_mtp_completeness_check()
            """),
            without="heads for later tokens keep their weights",
        ),
        Capability(
            "refuses arrangements that no update reaches",
            names("""
                vllm.engine.arg_utils: EngineArgs.create_engine_config
                vllm.config:ParallelConfig. data_parallel_size local_engines_only enable_eplb
                enable_elastic_ep
            """),
        ),
        Capability(
            "finds experts that move",
            names(f"""
                vllm.distributed.eplb.eplb_state: EplbState.model_states
                EplbModelState.physical_to_logical_map EplbModelState.rebalanced
                EplbModelState.model
                vllm.model_executor.models.interfaces: MixtureOfExperts.moe_layers
                vllm.v1.worker.gpu_model_runner: GPUModelRunner.eplb_state
                {_LAYERS}.fused_moe.runner.moe_runner: MoERunner.routed_experts
                {_LAYERS}.fused_moe.routed_experts:RoutedExperts. local_num_experts moe_config
                {_LAYERS}.fused_moe.config: FusedMoEConfig.moe_parallel_config
                FusedMoEParallelConfig.ep_rank
            """),
            without="--enable-eplb is refused",
            needed_by=BALANCED,
        ),
        Capability(
            "tells engines and front ends of a server apart",
            names("""
                vllm.config:ParallelConfig. world_size data_parallel_index
                data_parallel_rank_local data_parallel_hybrid_lb data_parallel_external_lb
            """),
        ),
        Capability(
            "asks all data-parallel engines",
            names("""
                vllm.v1.engine.core_client: AsyncMPClient.client_index AsyncMPClient.client_count
                DPLBAsyncMPClient.call_utility_all_async
            """),
            without="a server of several engines is refused",
        ),
        Capability(
            "leads engines of other servers that share experts",
            names(f"""
                {_CLIENT} shutdown()
                vllm.config:ParallelConfig. local_engines_only data_parallel_size_local
                stateless_init_dp_group(return_store)
                vllm.v1.engine.core: DPEngineCoreProc._init_data_parallel(vllm_config)
                vllm.v1.engine.core_client: AsyncMPClient.call_utility_async(method)
            """),
            without="engines of several servers that share experts are refused",
            needed_by=SHARED,
        ),
        Capability(
            "adds routes and a leader to a server",
            names("""
                vllm.plugins.endpoint_plugins.interface: attach_endpoint_plugins
                init_endpoint_plugins_state
            """),
            without="no server follows, only engines in your process",
            needed_by=SERVER,
        ),
        Capability(
            "keeps caches by version",
            names("""
                vllm.v1.core.sched.scheduler:Scheduler. add_request(request)
                set_pause_state(pause_state) pause_state waiting ec_connector running requests
                prev_step_scheduled_req_ids _preempt_request(request,timestamp)
                vllm.v1.engine.core:EngineCore. set_weight_version(weight_version) scheduler
                vllm.v1.request:Request. cache_salt mm_features num_computed_tokens
                num_output_tokens block_hashes update_block_hashes()
            """),
            without=f"pause mode {IN_PLACE} is refused",
            needed_by=IN_PLACE,
        ),
    ),
)
