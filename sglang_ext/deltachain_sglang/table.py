"""The names of SGLang that deltachain takes, by what it does with them; imports no SGLang itself.

SGLang ignores a hook of a function that it does not have, so all of them are here.
"""

from typing import Final

from deltachain.replica.capabilities import Capability, CapabilityTable, names

IN_PLACE: Final = "in_place"  # pause mode in which caches and running requests are kept

OUTLIVING: Final = ("enable_hierarchical_cache", "enable_lmcache")
"""Options with which cached prefixes outlive a flush, or prevent the scheduler from flushing."""

MOVING: Final = {
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "enable_eplb": False,
}
"""Options with which experts are copied or moved between slots, and their usual values."""

REPLACING: Final = {"elastic_ep_backend": None, "enable_elastic_expert_backup": False}
"""Options with which experts of lost ranks are loaded as they were at the start."""

BALANCED: Final = "moving experts"  # the use of a server with one of the options ``MOVING``

_LAYERS: Final = "sglang.srt.layers"
_MESSAGES: Final = "sglang.srt.managers.io_struct:"
_TOKENIZER: Final = "sglang.srt.managers.tokenizer_manager:TokenizerManager."
_SCHEDULER: Final = "sglang.srt.managers.scheduler:Scheduler."
_UPDATER: Final = (
    "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager."
)

TABLE: Final = CapabilityTable(
    engine="SGLang",
    tested=("0.5.22", "0.5.23"),
    rows=(
        Capability(
            "hooks its functions",
            names("""
                sglang.srt.plugins.hook_registry: HookRegistry._hooks
                HookRegistry.register(target,hook,hook_type) HookType.AROUND
            """),
        ),
        Capability(
            "asks its schedulers",
            names(f"""
                {_UPDATER} check_weights(recv_req) tp_worker draft_worker scheduler offload_tags
                is_fully_idle(ignore_waiting) flush_cache(empty_cache)
                {_SCHEDULER} grammar_manager _engine_paused
                {_TOKENIZER} check_weights(obj,request) auto_create_handle_loop()
                {_MESSAGES} CheckWeightsReqInput(action) CheckWeightsReqOutput(success,message)
                sglang.srt.managers.mm_schedule: embedding_cache
                sglang.srt.runtime_context: get_parallel() get_serving()
            """),
        ),
        Capability(
            "pauses generation",
            names(f"""
                {_SCHEDULER} pause_generation(recv_req) cur_batch_for_debug
                {_TOKENIZER} pause_generation(obj) continue_generation(obj)
                abort_request(abort_all) is_pause is_pause_cond model_update_lock
                {_MESSAGES} PauseGenerationReqInput(mode)
                ContinueGenerationReqInput(torch_empty_cache)
            """),
        ),
        Capability(
            "learns that it ended", names(f"{_TOKENIZER} _subprocess_watchdog gracefully_exit")
        ),
        Capability(
            "labels tokens with their version",
            names(f"""
                {_SCHEDULER} record_weight_version_change(new_version) result_queue chunked_req
                collect_inflight_reqs()
                sglang.srt.managers.schedule_batch: Req.weight_version_events
                sglang.srt.managers.utils:GenerationBatchResult. accept_lens copy_done
                sglang.srt.utils.weight_versions:
                WeightVersionEvent(old_version,num_output_tokens)
                {_TOKENIZER} update_weight_version(obj)
                {_MESSAGES} UpdateWeightVersionReqInput(new_version,abort_all_requests)
            """),
        ),
        Capability(
            "finds its layers",
            names(f"""
                sglang.srt.model_executor.model_runner:ModelRunner. load_model weight_updater
                sglang.srt.model_executor.model_runner_components.weight_updater:
                _unsupported_derived_weight_cache_error(model)
                sglang.srt.lora.layers: BaseLayerWithLoRA
                sglang.srt.utils: use_intel_amx_backend
                {_LAYERS}.linear: LinearBase
                {_LAYERS}.vocab_parallel_embedding: ParallelLMHead
                {_LAYERS}.moe.fused_moe_triton.layer: FusedMoE
                {_LAYERS}.moe.topk: StandardTopKOutput
                {_LAYERS}.moe.token_dispatcher.standard: StandardDispatchOutput
                StandardDispatcher
                {_LAYERS}.logits_processor: should_apply_lm_head_quant_method
                sglang.srt.runtime_context: get_model()
            """),
        ),
        Capability(
            "loads and packs layers",
            names(f"""
                sglang.srt.model_loader.loader: device_loading_context(module,target_device)
                DefaultModelLoader.load_weights_only(model,weights,target_device)
                QuantizedRLModelLoader.is_reload_scenario(model)
                _get_quantization_config(model_config,load_config)
                _initialize_model(model_config,load_config,quant_config)
                sglang.srt.model_loader.utils: set_default_torch_dtype(dtype)
                sglang.srt.configs.load_config: LoadConfig()
                {_LAYERS}.quantization.base_config:QuantizeMethodBase.
                restore_weights_before_loading(layer) process_weights_after_loading(layer)
            """),
        ),
        Capability(
            "refuses arrangements that no update reaches",
            names(f"""
                sglang.srt.runtime_context: get_exec() get_disagg() get_memory()
                sglang.srt.arg_groups.fields.parallel:Parallel. dp_size pp_size
                enable_dp_attention_local_control_broadcast
                sglang.srt.arg_groups.fields.disagg: Disagg.disaggregation_mode
                sglang.srt.arg_groups.fields.serving:Serving. enable_streaming_session
                tokenizer_worker_num
                sglang.srt.arg_groups.fields.model: Model.weight_cache_mode
                sglang.srt.arg_groups.fields.exec_:ExecMoe. {" ".join(MOVING | REPLACING)}
                sglang.srt.arg_groups.fields.memory:Memory. {" ".join(OUTLIVING)}
            """),
        ),
        Capability(
            "updates heads that draft",
            names("""
                sglang.srt.arg_groups.fields.spec: Spec.speculative_token_map
                sglang.srt.runtime_context: get_spec()
            """),
        ),
        Capability(
            "finds experts that move",
            names(f"""
                sglang.srt.eplb.expert_location: get_global_expert_location_metadata()
                ExpertLocationMetadata.physical_to_logical_map_cpu
                {_LAYERS}.moe.fused_moe_triton.layer:FusedMoE. uses_expert_location layer_id
                moe_ep_rank num_local_experts num_fused_shared_experts
            """),
            without="options with which experts move are refused",
            needed_by=BALANCED,
        ),
        Capability(
            "adds routes and a leader to a server",
            names(f"""
                sglang.srt.entrypoints.http_server: app get_global_state()
                _setup_and_run_http_server
                sglang.srt.entrypoints.engine: Engine._ensure_event_loop()
                sglang.srt.utils.auth: auth_level(level) AuthLevel.ADMIN_OPTIONAL
                sglang.srt.utils: kill_process_tree(parent_pid,include_parent)
                {_TOKENIZER} update_weights_from_disk(obj,request)
            """),
        ),
        Capability(
            "notices sleep",
            names(f"""
                {_TOKENIZER} release_memory_occupation(obj,request)
                resume_memory_occupation(obj,request)
                {_UPDATER} release_memory_occupation(recv_req)
                sglang.srt.constants: GPU_MEMORY_ALL_TYPES
            """),
        ),
        Capability(
            "keeps caches by version",
            names(f"""
                {_SCHEDULER} _add_request_to_queue(req) waiting_queue
                sglang.srt.managers.schedule_batch: Req.cache_salt
            """),
            without=f"pause mode {IN_PLACE} is refused",
            needed_by=IN_PLACE,
        ),
    ),
)
